#pragma once

#include <tessera/comm/patience.h>
#include <tessera/comm/processes.h>
#include <tessera/comm/shm/segment.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace tessera::shm {

/// This process as one member of a group that shares memory: how it waits for the others and wakes them, how it notices
/// that one is gone, and a thread that helps when they wait for it and it does something else.
class Member {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  explicit Member(const BackendRequest& request);
  ~Member();

  const Segment& segment() const { return segment_; }
  int64_t me() const { return me_; }
  int64_t size() const { return segment_.size(); }
  /// Of the world, by member.
  const std::vector<int64_t>& ranks() const { return ranks_; }
  MemberBlock& block() const { return segment_.member(me_); }

  using Counter = Shared<uint64_t> MemberBlock::*;
  bool all_reached(Counter counter, uint64_t value) const;
  /// Sets this member's counter, which grows by one at a time, and wakes those who wait for all to get there.
  void reach(Counter counter, uint64_t value) const;
  /// Waits until all members have got there. Throws PeerError if that cannot be, or not within the timeout; from then on
  /// the group has failed. `what` describes the call.
  void wait_for_all(Counter counter, uint64_t value, Milliseconds timeout,
                    c10::function_ref<std::string()> what);

  /// The group has failed, or this member has left it.
  bool is_interrupted() const {
    return interrupted_.load(std::memory_order_relaxed) ||
           segment_.group().failure.value.load(std::memory_order_relaxed) != GroupBlock::none;
  }
  /// Throws PeerError then.
  void check_not_interrupted(c10::function_ref<std::string()> what) const;
  /// Why `member` cannot be waited for: it has left or ended. Else "".
  std::string why_gone(int64_t member);
  /// The group fails, on all members; the first reason counts.
  void fail(const std::string& reason);
  void abort();

  /// Sleeps until somebody rings for this member, or so long, unless `is_done`.
  void listen(c10::function_ref<bool()> is_done, std::chrono::nanoseconds limit) const;
  /// Lets `member` look at what there is for it: if it listens for messages, or else (`always`) if it has a helper.
  void ring(int64_t member, bool always) const;

  /// From now on somebody rings for this member if they wait for it: then `help` is called, on another thread.
  void start_helper(const std::function<void()>& help);
  /// Takes part in nothing more. Ends the helper.
  void leave();

  int spins() const { return spins_; }
  /// The error of who waited for `what` in vain.
  [[noreturn]] void throw_peer_error(const std::string& what, const std::string& reason) const;

  /// One that waits sleeps at most so long before it looks whether those that it waits for are still there: first, and
  /// after that twice as long each time.
  static constexpr Milliseconds kFirstLook{100}, kLastLook{1000};

 private:
  void wait_long(Counter counter, uint64_t value, Milliseconds timeout,
                 c10::function_ref<std::string()> what);
  std::vector<int64_t> behind(Counter counter, uint64_t value) const;
  std::string failure() const;
  void interrupt(const std::string& reason);

  const Segment segment_;
  const int64_t me_;
  const std::vector<int64_t> ranks_;
  const int spins_;
  std::atomic<bool> interrupted_{false};
  mutable std::mutex mutex_;  // of what follows
  std::string reason_;
  std::map<int64_t, ProcessWatch> watches_;
  std::thread helper_;
  bool has_left_ = false;
};

}  // namespace tessera::shm
