#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::threads {

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Where threads wait for one another: they look again for a short while, then give way to other threads,
/// then sleep. Fast while ranks have a core each, and kind to the machine when they outnumber the cores.
class WaitingRoom {
 public:
  using Clock = std::chrono::steady_clock;

  /// `crowded`: more ranks than cores, so that spinning would keep the awaited rank from running.
  explicit WaitingRoom(bool crowded) : spins_(crowded ? 20 : 200) {}

  /// Returns true once `done()` is true, false if it is not by `deadline`. `done` may do useful work; whoever
  /// makes it true must call `wake` after.
  template <class Done>
  bool wait_until(Clock::time_point deadline, Done&& done) {
    for (int i = 0; i < spins_; ++i) {
      if (done()) return true;
      pause_cpu();
    }
    for (const auto end = Clock::now() + kYielding; Clock::now() < end;) {
      if (done()) return true;
      std::this_thread::yield();
    }
    sleepers_.fetch_add(1);
    std::unique_lock lock(mutex_);
    while (true) {
      const uint64_t seen = wakes_;
      lock.unlock();
      const bool ready = done();
      lock.lock();
      if (ready || !changed_.wait_until(lock, deadline, [&] { return wakes_ != seen; })) {
        sleepers_.fetch_sub(1);
        return ready;
      }
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
  static constexpr std::chrono::microseconds kYielding{100};

  const int spins_;
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t wakes_ = 0;  // guarded by mutex_
};

}  // namespace tessera::threads
