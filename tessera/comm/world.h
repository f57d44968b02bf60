#pragma once

#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace c10d {
class ProcessGroup;
}

namespace tessera {

class ProcessRank;
namespace threads {
class Hub;
}

/// Ranks that communicate with one another, as any c10d code knows them. Only declared here, as its
/// definition takes long to compile: include tessera/comm/collectives.h, or c10d's ProcessGroup.hpp, to use
/// one.
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The longest wait in Tessera unless the caller gives another timeout.
inline constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(10);
/// Whoever gives a longer one waits so long: clocks cannot count to the end of milliseconds::max().
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

struct WorldOptions {
  int64_t rank = 0;
  int64_t size = 1;

  /// What carries the tensors: a name known to `register_backend`, or one per device type as in
  /// "cpu:gloo,cuda:nccl". Empty: for CPU tensors "threads" where the ranks are threads of one process;
  /// between processes what TESSERA_BACKEND names in the environment, else "shm" in groups within one host
  /// and "gloo" in others. For CUDA tensors "nccl".
  std::string backend = {};

  /// Where processes find one another. Not needed by "fake".
  c10::intrusive_ptr<c10d::Store> store = {};

  std::chrono::milliseconds timeout = kDefaultTimeout;

  /// Compare what the ranks call before each collective and report a mismatch on all of them. Costs one
  /// small all-gather a call. Ranks that are threads are always compared, for free.
  /// Also switched on by TESSERA_CHECK_COLLECTIVES=1 in the environment, and in debug builds unless that is 0.
  bool check_collectives = false;

  /// With the backend "fake": tensors on meta are communicated like any others, so that observers see what would move.
  /// (Elsewhere nothing is called for them, as they have no values.)
  bool dry_run = false;

  /// Called before the world makes a group: returns an existing group of exactly these ranks, for tensors on
  /// that device, or null.
  std::function<Group(c10::IntArrayRef ranks, c10::DeviceType device)> existing_group = {};

  /// Set by `run`: the memory that rank threads share. Null for ranks that are processes.
  std::shared_ptr<threads::Hub> hub = {};
};

/// One rank's view of the ranks that run a program together, and the maker of groups among them.
/// Safe to use from several threads of that rank.
class TESSERA_API World {
 public:
  explicit World(WorldOptions options);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int64_t rank() const { return options_.rank; }
  int64_t size() const { return options_.size; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  /// WorldOptions::dry_run
  bool is_dry_run() const { return options_.dry_run; }
  /// Whether the ranks are threads of this process.
  bool is_threads() const { return options_.hub != nullptr; }

  /// The name of the backend that carries tensors on `device`.
  std::string backend(c10::DeviceType device) const;

  /// The group of `ranks` (ranks of this world, in this order; this rank among them) for tensors on `device`.
  /// It is made at the first call, by its members alone, and kept as long as the world: the same ranks give
  /// the same group. `backend` overrides the world's own choice.
  Group group(c10::IntArrayRef ranks, c10::DeviceType device, const std::string& backend = "");

  /// The group of all ranks.
  Group group(c10::DeviceType device = c10::DeviceType::CPU);

  /// A group of all ranks, for CPU tensors, that is made for `purpose` alone. What is called on it is not in
  /// order with what is called on other groups, so that another thread of each rank may do so.
  Group group_for(const std::string& purpose);

  /// From now on, messages say `name` of the group too, as in "group tp [0, 2]". The first name of a group stays.
  void name_group(const Group& group, const std::string& name);

  /// The name of a group: of the mesh dim that its ranks are along, or of several, as "dp_tp". Empty if it has none.
  std::string name_of(const Group& group) const;

  /// The ranks of a group that this world made, or nothing if it did not make it.
  std::optional<std::vector<int64_t>> ranks_of(const Group& group) const;

  /// On ranks that are threads: waits until all of them are here, all with the same `what`, and throws on all
  /// of them if it differs. For changes of process-wide state, which they have to make together. Does nothing
  /// on ranks that are processes.
  void meet(const std::string& what);

  const WorldOptions& options() const { return options_; }

  /// The state that ranks share if they are threads; null if they are processes.
  const std::shared_ptr<threads::Hub>& hub() const { return options_.hub; }

  /// What a rank that is a process does about faults; null for threads, for a world of one and where there is no store.
  const std::shared_ptr<ProcessRank>& process_rank() const { return process_rank_; }

  /// Notifies all ranks of the world that this one has failed and why: they stop waiting at once, whatever they wait for.
  /// Never throws.
  void report_failure(const std::string& reason) noexcept;

  /// What failed first on any rank: "rank 2 failed: out of memory". Empty if nothing did.
  std::string reported_failure() const;

  /// Ranks that have died or ended, as far as this one has heard. Of ranks that are threads: none.
  std::vector<int64_t> lost_ranks() const;

  /// Waits until all other ranks have ended, or that long, and throws if one of them fails before. Does nothing on ranks
  /// that are threads.
  void wait_for_end_of_others(std::chrono::milliseconds patience) const;

  /// Says goodbye to the other ranks: those who wait for this one from now on get an error. The groups that this world made
  /// end. Nothing happens on ranks that are threads.
  void leave();

 private:
  struct GroupKey {
    std::vector<int64_t> ranks;
    c10::DeviceType device;
    std::string backend;
    std::string purpose;
    auto operator<=>(const GroupKey&) const = default;
  };

  /// Null if there is none.
  Group find(const GroupKey& key) const;
  Group keep(GroupKey key, Group group);
  /// With `making_`.
  Group find_or_make(GroupKey key);

  WorldOptions options_;
  std::map<std::string, std::string> backends_;  // by device type name; "" for all others
  mutable std::mutex mutex_;                     // of groups and names, for moments
  std::map<GroupKey, Group> groups_;
  std::map<const c10d::ProcessGroup*, std::string> names_;  // of groups
  std::shared_ptr<ProcessRank> process_rank_;
  std::mutex making_;  // held while a group is made, which may take long, and call into Python
};

/// The world of the calling thread: that of the innermost `WorldScope`, else of the process
/// (`init_process_group`). An error that says what to do if there is none.
TESSERA_API std::shared_ptr<World> current_world();
TESSERA_API bool has_current_world();

/// While alive, makes `world` the current world of the calling thread.
class TESSERA_API WorldScope {
 public:
  explicit WorldScope(std::shared_ptr<World> world);
  ~WorldScope();
  WorldScope(const WorldScope&) = delete;
  WorldScope& operator=(const WorldScope&) = delete;

 private:
  ThreadScope<std::shared_ptr<World>, WorldScope> scope_;
};

/// Makes this process one rank of a world of processes, as its launcher's environment variables say
/// (see environment.h), and that world the current one of all of its threads that have no other.
TESSERA_API std::shared_ptr<World> init_process_group(const std::string& backend = "",
                                                      std::chrono::milliseconds timeout = kDefaultTimeout);
/// The same with everything given by the caller.
TESSERA_API std::shared_ptr<World> init_process_group(WorldOptions options);
/// Ends the process's world: its groups, too, so that meshes and tensors that are left of it cannot communicate any more.
TESSERA_API void destroy_process_group();

/// Replaces the process's world by one of the ranks that are left, after some have died: they keep their order, and
/// have ranks from 0. Collective among them; throws if one of them does not come within the timeout of the world. Meshes
/// and tensors of the old world are of no use any more: make new ones, and load the last checkpoint.
TESSERA_API std::shared_ptr<World> shrink_process_group();

TESSERA_API int64_t get_rank();
TESSERA_API int64_t get_world_size();

}  // namespace tessera
