#pragma once

#include <tessera/comm/patience.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace tessera::threads {

/// Where threads wait for one another: they look again for a short while, then give way to other threads,
/// then sleep. Fast while ranks have a core each, and kind to the machine when they outnumber the cores.
class WaitingRoom {
 public:
  using Clock = std::chrono::steady_clock;

  /// `crowded`: more ranks than cores, so that spinning would keep the awaited rank from running.
  explicit WaitingRoom(bool crowded) : spins_(comm::spins(crowded)) {}

  /// Returns true once `done()` is true, false if it is not within `timeout`. `done` may do useful work;
  /// whoever makes it true must call `wake` after. `stalled` is called once if it takes longer than
  /// kPatience.
  template <class Done, class Stalled>
  bool wait_for(std::chrono::milliseconds timeout, Done&& done, Stalled&& stalled) {
    for (int i = 0; i < spins_; ++i) {
      if (done()) return true;
      comm::pause_cpu();
    }
    const auto start = Clock::now();
    for (const auto end = start + comm::kYielding; Clock::now() < end;) {
      if (done()) return true;
      std::this_thread::yield();
    }
    const auto deadline = start + timeout;
    bool has_stalled = false;
    sleepers_.fetch_add(1);
    std::unique_lock lock(mutex_);
    while (true) {
      const uint64_t seen = wakes_;
      lock.unlock();
      const bool ready = done();
      lock.lock();
      const auto until = has_stalled ? deadline : std::min(deadline, start + kPatience);
      if (!ready && changed_.wait_until(lock, until, [&] { return wakes_ != seen; })) continue;
      if (ready || until == deadline) {
        sleepers_.fetch_sub(1);
        return ready;
      }
      has_stalled = true;
      lock.unlock();
      stalled();
      lock.lock();
    }
  }

  /// Lets all who wait look again.
  void wake() {
    if (sleepers_.load() == 0) return;
    {
      std::lock_guard lock(mutex_);
      ++wakes_;
    }
    changed_.notify_all();
  }

 private:
  // Far longer than waits of ranks that progress, so that `stalled` costs nothing in practice.
  static constexpr std::chrono::milliseconds kPatience{50};

  const int spins_;
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t wakes_ = 0;  // guarded by mutex_
};

}  // namespace tessera::threads
