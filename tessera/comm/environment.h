#pragma once

#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

/// What a launcher passes to the processes it starts.
struct LaunchInfo {
  std::string launcher;  // "torchrun", "mpirun" or "slurm"
  int64_t rank = 0;
  int64_t size = 1;
  int64_t local_rank = 0;  // among the processes of this machine
  std::string master_address = "127.0.0.1";
  uint16_t master_port = 29500;
  /// torchrun's agent keeps the store, for this attempt (it restarts the processes when one fails).
  bool agent_store = false;
  int64_t attempt = 0;
};

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string&)>;

/// What the environment says, or nothing if no launcher started this process. The first of these that is
/// there:
///
///   torchrun  RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE
///   mpirun    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK
///   slurm     SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_JOB_NODELIST SLURM_JOB_ID
///
/// MASTER_ADDR and MASTER_PORT, where rank 0 keeps the store, may be given to all. Without them mpirun's
/// processes are taken to be on one machine (a world over several is an error that says to set MASTER_ADDR),
/// and Slurm's find rank 0 on the first node of the job, at a port made from the job's id.
/// Values that make no sense are errors that name the variable.
TESSERA_API std::optional<LaunchInfo> launch_info(const EnvironmentLookup& lookup);
/// The same from this process's environment.
TESSERA_API std::optional<LaunchInfo> launch_info();

/// The first host of a Slurm node list: "gpu[03-05,09],login1" -> "gpu03", "rack[1-2]n[0-7]" -> "rack1n0".
TESSERA_API std::string first_slurm_host(const std::string& node_list);

/// Connects to the store that these processes share; rank 0 keeps it unless torchrun does.
TESSERA_API c10::intrusive_ptr<c10d::Store> connect_store(const LaunchInfo& info,
                                                          std::chrono::milliseconds timeout);

}  // namespace tessera
