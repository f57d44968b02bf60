#pragma once

#include <tessera/comm/call.h>
#include <tessera/comm/threads/roster.h>
#include <tessera/comm/threads/wait.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace tessera::threads {

using comm::CollectiveCall;
using comm::CollectivePlan;
using comm::Task;

/// The collectives of one group whose ranks are threads of this process.
///
/// A rank posts its call of a collective and, then or later, waits for it. When all calls of the oldest
/// collective are posted it is opened: the rank that posted last checks that they match and makes the plan.
/// A small collective is carried out on the spot. A large one is split into chunks, which all ranks that wait
/// take one by one, reading and writing each other's memory. So a collective needs the posts of all ranks but
/// the help of none: a rank that posts and does something else delays nobody.
///
/// Collectives are done in the order of their sequence numbers (1, 2, ...). What a chunk computes does not
/// depend on who computes it.
class GroupCollectives {
 public:
  using Clock = WaitingRoom::Clock;

  /// `members`: the world ranks. `crowded`: see WaitingRoom.
  GroupCollectives(std::vector<int64_t> members, bool crowded, std::shared_ptr<Roster> roster);

  /// Posts the next collective of member `member` and returns its sequence number. Does not wait for anyone,
  /// unless kWindow collectives of this member are still under way.
  uint64_t post(int64_t member, CollectiveCall call, std::chrono::milliseconds timeout);

  /// Waits for collective `number`, which `what` describes. Throws what went wrong if it, or the group,
  /// failed.
  void wait(int64_t member, uint64_t number, std::chrono::milliseconds timeout,
            c10::function_ref<std::string()> what);

  /// Whether collective `number` is done; helps if it can be.
  bool poll(uint64_t number);

  /// Makes all present and future waits fail with this reason. A collective that all have posted is still
  /// done.
  void abort(const std::string& reason);

  /// Says that `member` will post no more: those who wait for it, or ever do, get an error.
  void leave(int64_t member);

  const std::vector<int64_t>& members() const { return members_; }
  WaitingRoom& room() { return room_; }
  Roster& roster() { return *roster_; }
  /// Member `member` does `what`, which outlives this: "barrier", "send".
  void acts(int64_t member, const char* what) {
    last_[member].store(what, std::memory_order_relaxed);
    roster_->acts(members_[member], *this);
  }
  /// What the member of this world rank did last: "barrier, collective 2 of group [0, 1]".
  std::string last_of(int64_t rank) const;
  /// How many collectives the member has posted.
  uint64_t posted(int64_t member) const { return posted_[member]; }
  bool aborted() const { return aborted_; }
  bool has_left(int64_t member) const;
  /// Throws the error of a member whose `what` cannot be done because the group was aborted.
  [[noreturn]] void throw_aborted(int64_t member, const std::string& what) const;

 private:
  /// As `wait`, but of a collective whose calls did not fit only that it is over.
  void wait_until_done(int64_t member, uint64_t number, std::chrono::milliseconds timeout,
                       c10::function_ref<std::string()> what);

  static constexpr uint64_t kWindow = 64;
  static constexpr uint32_t kAborted = 1u << 31;

  /// One collective under way. Reused for number + kWindow when it is done.
  struct alignas(64) Slot {
    /// How many of these have come: the posts of all members, and the end of the collective before. The last
    /// to come opens it. Once kAborted is added nothing more is counted, so that it stays
    /// known whether it was opened before the group failed.
    std::atomic<uint32_t> arrived{0};
    /// Chunks not yet taken, in the low half; in the high half the number of the collective they belong to,
    /// so that one who comes late cannot take a chunk of the next.
    std::atomic<uint64_t> chunks{0};
    std::atomic<uint32_t> unfinished{0};
    std::vector<CollectiveCall> calls;
    CollectivePlan plan;
    std::vector<uint32_t> first_chunk;  // of each task
    bool streaming = false;             // see copy_bytes
  };
  enum class Arrival { early, last, refused };

  Slot& slot(uint64_t number) { return slots_[number % kWindow]; }
  Arrival arrive(Slot& slot) const;
  /// Makes the plan. True if the collective is thereby done.
  bool open(uint64_t number);
  /// Ends the collective and opens those that were waiting for it.
  void finish(uint64_t number);
  /// Does one chunk of the open collective. False if there is none to do.
  bool help();
  static void run_chunk(const Slot& slot, uint32_t chunk);
  static void run_task(const Slot& slot, const Task& task, int64_t first, int64_t elements);

  /// Whether the collective will never be opened, because the group failed first.
  bool is_lost(const Slot& slot) const;
  void abort_if_awaiting_the_departed(uint64_t number);
  std::vector<size_t> missing(uint64_t number) const;            // members
  std::optional<std::vector<int64_t>> awaited(uint64_t number);  // see Roster::Sleep
  std::string missing_text(uint64_t number) const;

  const std::vector<int64_t> members_;
  const uint32_t complete_;  // what Slot::arrived is when all have come
  const std::shared_ptr<Roster> roster_;
  WaitingRoom room_;
  std::vector<std::atomic<uint64_t>> posted_;   // by member: the number of its last post
  std::vector<std::atomic<const char*>> last_;  // by member: what it did last
  std::array<Slot, kWindow> slots_;
  alignas(64) std::atomic<uint64_t> done_{0};  // all collectives up to this number are done

  std::atomic<bool> aborted_{false};
  std::atomic<bool> someone_left_{false};
  std::atomic<bool> has_failures_{false};
  mutable std::mutex mutex_;  // of what follows
  std::string reason_;
  std::vector<bool> left_;
  struct Failure {
    comm::ErrorKind kind;
    std::string text;
    size_t unheard;  // by as many members
  };
  std::map<uint64_t, Failure> failures_;  // collectives whose calls did not fit
};

}  // namespace tessera::threads
