#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tessera::shm {

/// A word in shared memory that processes sleep on until another one changes it.
using Futex = std::atomic<uint32_t>;
static_assert(Futex::is_always_lock_free && sizeof(Futex) == sizeof(uint32_t));

/// Sleeps while the word is `seen`, at most so long. May return early.
inline void sleep_on(Futex& word, uint32_t seen, std::chrono::nanoseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec time{};
  time.tv_sec = seconds.count();
  time.tv_nsec = (limit - seconds).count();
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

/// Changes the word, and wakes all who sleep on it.
inline void wake(Futex& word) {
  word.fetch_add(1);
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tessera::shm
