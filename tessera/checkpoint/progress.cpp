#include <tessera/checkpoint/progress.h>

#include <algorithm>
#include <cstdio>
#include <unistd.h>

namespace tessera::checkpoint {

namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr int kBarWidth = 30;

}  // namespace

ProgressMeter::ProgressMeter(std::string_view phase, int64_t total, ProgressCallback callback, bool show_bar)
    : phase_(phase),
      total_(total),
      callback_(std::move(callback)),
      bar_(show_bar && !callback_ && isatty(STDERR_FILENO)),
      next_(start_ + (callback_ ? kInterval : std::chrono::milliseconds(1000))) {}

ProgressMeter::~ProgressMeter() {
  if (is_drawn_) std::fputs("\r\033[K", stderr);
}

void ProgressMeter::add(int64_t bytes) {
  bytes_ += bytes;
  if ((!callback_ && !bar_) || Clock::now() < next_) return;
  next_ = Clock::now() + kInterval;
  report();
}

void ProgressMeter::finish() {
  bytes_ = total_;
  if (callback_) report();
}

void ProgressMeter::report() {
  if (callback_) return callback_({phase_, bytes_, total_});
  const double part =
      total_ > 0 ? std::min(1.0, static_cast<double>(bytes_) / static_cast<double>(total_)) : 0;
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const int filled = static_cast<int>(part * kBarWidth);
  std::string bar(filled, '#');
  bar.resize(kBarWidth, '.');
  std::fprintf(stderr, "\r\033[K%s [%s] %3.0f %%  %.2f of %.2f GB  %.2f GB/s", phase_.c_str(), bar.c_str(),
               part * 100, static_cast<double>(bytes_) / 1e9, static_cast<double>(total_) / 1e9,
               static_cast<double>(bytes_) / 1e9 / seconds);
  std::fflush(stderr);
  is_drawn_ = true;
}

}  // namespace tessera::checkpoint
