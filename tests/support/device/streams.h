#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

/// The streams of the test device: queues of work that is done later.
namespace tessera::testing::device {

/// Work that is done in order, by whoever waits for it, or else by a thread of the device after `lag()`.
/// Work that waits for another stream does that stream's work, so waits in a circle are the only deadlock.
class Stream {
 public:
  using Work = std::function<void()>;

  /// Returns the number of this work: 1, 2, ...
  uint64_t submit(Work work);
  /// All that was submitted so far.
  uint64_t submitted() const;
  bool is_done(uint64_t number) const;
  /// Returns when work `number` and all before it is done.
  void wait(uint64_t number);
  void wait() { wait(submitted()); }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  uint64_t submitted_ = 0, done_ = 0;
  bool is_working_ = false;
};

/// How long work that nobody waits for stays undone. A test that makes it long sees each missing synchronization.
std::chrono::milliseconds lag();

class LagScope {
 public:
  explicit LagScope(std::chrono::milliseconds lag);
  ~LagScope();
  LagScope(const LagScope&) = delete;
  LagScope& operator=(const LagScope&) = delete;

 private:
  const std::chrono::milliseconds previous_;
};

}  // namespace tessera::testing::device
