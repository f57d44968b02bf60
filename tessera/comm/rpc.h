#pragma once

#include <tessera/comm/world.h>
#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace torch::distributed::rpc {
class UserRRef;
}

/// Calls from one process to another, in which the others need not take part: libtorch's own RPC, for ranks
/// that are processes. Ranks that are threads of one process have no need of it, so that `init_rpc` and
/// `shutdown` do nothing there and a program can be the same for both.
///
/// A process has one RPC. If torch.distributed.rpc of Python initialized it, that one is taken.
namespace tessera::rpc {

/// The longest that a call waits for its answer unless the caller gives another timeout.
inline constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(1);

struct Options {
  /// This process's name; no two may have the same. Empty: "worker" and its rank, as in "worker0".
  std::string name = {};
  /// The longest that `init_rpc` waits for the other ranks, and a call for its answer unless it says
  /// otherwise.
  std::chrono::milliseconds timeout = kDefaultTimeout;
  /// Threads that answer the calls of others.
  int threads = 4;
};

/// Makes this process one that can call the other ranks of the current world and be called by them.
/// Collective: returns when all ranks are there, and throws on all of them if one cannot, within the timeout.
/// If this process is initialized already under that name, nothing happens.
TESSERA_API void init_rpc(const Options& options = {});

/// Ends what `init_rpc` began; nothing happens if it is not initialized. `graceful`: collective, waits until
/// all ranks have called it, so that none loses an answer it waits for. If some do not come within the
/// timeout, this process's RPC is ended nevertheless, and an error names them. Not graceful: ends at once;
/// calls under way fail, on both sides.
TESSERA_API void shutdown(bool graceful = true, std::chrono::milliseconds timeout = kDefaultTimeout);

TESSERA_API bool is_initialized();

/// The name of a rank. Throws if RPC is not initialized or there is no such rank.
TESSERA_API std::string worker_name(int64_t rank);
/// The rank of that name, or nothing. Throws if RPC is not initialized.
TESSERA_API std::optional<int64_t> worker_rank(const std::string& name);

/// Why the ranks of `world` cannot be called from here; empty if they can.
TESSERA_API std::string why_not(const World& world);

/// What the operator of this name, such as "aten::add.Tensor", gives for these arguments on another rank.
/// libtorch knows only operators of "aten" there. Throws if that throws, if the other process is not there
/// any more, and if there is no answer within the timeout (by default that of `init_rpc`).
TESSERA_API c10::IValue rpc_sync(int64_t rank, const std::string& op, std::vector<c10::IValue> arguments,
                                 std::optional<std::chrono::milliseconds> timeout = {});

/// Lets another rank run that operator, without waiting for it. Whatever fails, also that there is no RPC (any more), is
/// ignored: for what destructors have to say.
TESSERA_API void notify(int64_t rank, const std::string& op, std::vector<c10::IValue> arguments) noexcept;

/// Include <torch/csrc/distributed/rpc/rref_impl.h> to use one.
using RRef = c10::intrusive_ptr<torch::distributed::rpc::UserRRef>;

/// A reference to that result, which stays on the other rank as long as one refers to it. Returns at once;
/// errors come from its toHere().
TESSERA_API RRef remote(int64_t rank, const std::string& op, std::vector<c10::IValue> arguments,
                        std::optional<std::chrono::milliseconds> timeout = {});

}  // namespace tessera::rpc
