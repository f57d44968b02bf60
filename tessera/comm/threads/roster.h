#pragma once

#include <tessera/comm/waits.h>
#include <tessera/thread_scope.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tessera::threads {

class GroupCollectives;

/// What is known of the ranks of one `run`, threads of this process: who sleeps, waiting for whom, and where
/// each was active last. Ranks that wait for each other in a circle are found here.
///
/// Nothing here is touched by waits that are short: see WaitingRoom::wait_until.
class Roster {
 public:
  explicit Roster(int64_t size) : ranks_(size) {}

  /// While alive, says that the calling thread is the one that `run` started for the rank.
  class OwnThread {
   public:
    OwnThread(Roster& roster, int64_t rank) : scope_(&roster.ranks_[rank]) {}

   private:
    ThreadScope<const void*, OwnThread> scope_;
  };

  /// The calling thread acts for `rank`: posts a collective or a message of `group`.
  void acts(int64_t rank, const GroupCollectives& group) {
    Rank& state = ranks_[rank];
    state.last.store(&group, std::memory_order_relaxed);
    if (!is_own_thread(state)) [[unlikely]]
      state.has_helpers.store(true, std::memory_order_relaxed);
  }

  struct Sleep {
    int64_t rank = 0;
    std::string where;  // "in barrier(), collective 2 of group [0, 1]"
    /// The ranks that have not yet done what this one waits for, which stays so as long as they sleep;
    /// nothing if it is about to wake up.
    std::function<std::optional<std::vector<int64_t>>()> awaited;
    bool any = false;      // one of them is enough
    bool is_final = true;  // no plan of its own for the case that they never do
    /// Ends the sleep with an error.
    std::function<void(const std::string& reason)> fail;
  };

  /// While alive, registers the calling thread as asleep. If that closes a circle of ranks that wait for each
  /// other, all of them get the error that names it.
  class Sleeping {
   public:
    Sleeping(Roster& roster, Sleep sleep);
    ~Sleeping();
    Sleeping(const Sleeping&) = delete;
    Sleeping& operator=(const Sleeping&) = delete;

   private:
    Roster& roster_;
    const Sleep sleep_;
    std::optional<Wait> wait_;
  };

  /// Rank `rank` has ended.
  void leave(int64_t rank);
  /// The groups are no more.
  void forget_groups();

 private:
  struct alignas(64) Rank {
    std::atomic<const GroupCollectives*> last{nullptr};
    /// Whether a thread that is not its own has acted for it. What such a rank will do cannot be known from
    /// what its own thread waits for.
    std::atomic<bool> has_helpers{false};
    const Sleep* sleep = nullptr;  // of its own thread; guarded by mutex_
    bool has_left = false;         // guarded by mutex_
  };

  static bool is_own_thread(const Rank& rank) {
    return ThreadScope<const void*, OwnThread>::current() == &rank;
  }

  // Both with mutex_ held.
  std::vector<bool> stuck() const;
  void check() const;
  std::string others() const;
  static std::string text(const Sleep& sleep);

  std::vector<Rank> ranks_;
  mutable std::mutex mutex_;
};

}  // namespace tessera::threads
