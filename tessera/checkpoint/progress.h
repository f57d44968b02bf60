#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

/// Counts the bytes of one phase, and now and then calls the user's function, or shows a bar on the terminal.
class ProgressMeter {
 public:
  /// `show_bar`: if there is no function, stderr is a terminal and it takes longer than a second.
  ProgressMeter(std::string_view phase, int64_t total, ProgressCallback callback, bool show_bar);
  /// Clears the bar.
  ~ProgressMeter();
  ProgressMeter(const ProgressMeter&) = delete;
  ProgressMeter& operator=(const ProgressMeter&) = delete;

  void add(int64_t bytes);
  /// Reports that all is done.
  void finish();

 private:
  void report();

  using Clock = std::chrono::steady_clock;
  const std::string phase_;
  const int64_t total_;
  const ProgressCallback callback_;
  const bool bar_;
  int64_t bytes_ = 0;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point next_;
  bool is_drawn_ = false;
};

}  // namespace tessera::checkpoint
