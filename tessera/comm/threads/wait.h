#pragma once

#include <algorithm>
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
  explicit WaitingRoom(bool crowded) : spins_(crowded ? kCrowdedSpins : kSpins) {}

  /// Returns true once `done()` is true, false if it is not within `timeout`. `done` may do useful work;
  /// whoever makes it true must call `wake` after. `stalled` is called once if it takes longer than
  /// kPatience.
  template <class Done, class Stalled>
  bool wait_for(std::chrono::milliseconds timeout, Done&& done, Stalled&& stalled) {
    for (int i = 0; i < spins_; ++i) {
      if (done()) return true;
      pause_cpu();
    }
    const auto start = Clock::now();
    for (const auto end = start + kYielding; Clock::now() < end;) {
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
  // A pause takes some 10 to 40 ns, so 200 are a few microseconds: more than a small collective of ranks that
  // run takes (about 0.5 us), less than it costs to put a thread to sleep and wake it. If ranks outnumber
  // cores, the awaited rank most likely does not run, and only a yield lets it.
  static constexpr int kSpins = 200;
  static constexpr int kCrowdedSpins = 20;
  // Longer than ranks usually drift apart within an operator; a rank that is still awaited then computes or
  // loads, and sleeping leaves it the core.
  static constexpr std::chrono::microseconds kYielding{100};
  // Far longer than waits of ranks that progress, so that `stalled` costs nothing in practice.
  static constexpr std::chrono::milliseconds kPatience{50};

  const int spins_;
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t wakes_ = 0;  // guarded by mutex_
};

}  // namespace tessera::threads
