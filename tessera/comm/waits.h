#pragma once

#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

/// While alive, registers a wait for other ranks with the process. When the oldest wait has lasted for 30 s,
/// and each time it has lasted twice as long, one line on stderr says of all of them which rank waits where
/// and for whom, so that a hang is understood long before its timeout.
///
/// TESSERA_WAIT_REPORT_SECONDS in the environment sets the first interval; 0: there are no such lines.
class TESSERA_API Wait {
 public:
  /// What a line says of ranks that do not wait, once for all waits that have the same one.
  using Others = std::function<std::string()>;

  /// Rank `rank` waits; `where` completes "rank 2 has waited for 30 s ". It and `others` are called from
  /// another thread.
  Wait(int64_t rank, std::function<std::string()> where, const void* ranks = nullptr, Others others = {});
  ~Wait();
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

 private:
  friend class Watch;
  using Clock = std::chrono::steady_clock;

  const int64_t rank_;
  const std::function<std::string()> where_;
  const void* const ranks_;
  const Others others_;
  const Clock::time_point since_ = Clock::now();
  int reports_ = 0;  // guarded by the watch
};

}  // namespace tessera
