#include <tessera/comm/waits.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <list>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

#include <c10/util/Exception.h>

namespace tessera {

namespace {

/// Zero: no reports.
std::chrono::milliseconds first_interval() {
  const char* text = std::getenv("TESSERA_WAIT_REPORT_SECONDS");
  char* end = nullptr;
  const double seconds = text ? std::strtod(text, &end) : 30;
  if (text && (end == text || !(seconds >= 0 && seconds < 1e6))) return std::chrono::seconds(30);
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// Waits that one line describes; the others are counted.
constexpr size_t kShown = 16;

}  // namespace

/// All waits of the process, and a thread that reports those that last. There is one as long as there are
/// waits, and a while longer.
class Watch {
 public:
  /// Never destroyed: its thread may be there until the process ends.
  static Watch& instance() {
    static auto& watch = *new Watch;
    return watch;
  }

  void add(Wait& wait) {
    const std::lock_guard lock(mutex_);
    waits_.push_back(&wait);
    if (is_running_ || interval_.count() == 0) return;
    try {
      std::thread([this] { run(); }).detach();
      is_running_ = true;
    } catch (const std::system_error&) {  // no thread to be had: then without reports
    }
  }

  void remove(Wait& wait) {
    const std::lock_guard lock(mutex_);
    waits_.remove(&wait);
  }

 private:
  using Clock = Wait::Clock;

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (waits_.empty()) {
        sleep_until(lock, Clock::now() + interval_);
        if (!waits_.empty()) continue;
        is_running_ = false;
        return;
      }
      if (const auto due = due_of(*waits_.front()); Clock::now() < due) {
        sleep_until(lock, due);
        continue;
      }
      const std::string text = report();
      lock.unlock();
      TORCH_WARN("tessera: ", text);
      lock.lock();
    }
  }

  /// Nobody wakes it: no wait is due before the one that it sleeps for.
  void sleep_until(std::unique_lock<std::mutex>& lock, Clock::time_point time) {
    nobody_.wait_until(lock, time, [&] { return Clock::now() >= time; });
  }

  Clock::time_point due_of(const Wait& wait) const {
    return wait.since_ + interval_ * (int64_t{1} << std::min(wait.reports_, 30));
  }

  std::string report() {
    const auto now = Clock::now();
    std::string text;
    std::set<const void*> described;
    size_t shown = 0;
    for (Wait* wait : waits_) {
      while (due_of(*wait) <= now) ++wait->reports_;
      if (++shown > kShown) continue;
      const auto seconds = std::chrono::duration<double>(now - wait->since_).count();
      text += c10::str(text.empty() ? "" : "; ", "rank ", wait->rank_, " has waited for ",
                       static_cast<int64_t>(seconds * 10) / 10.0, " s ", wait->where_());
    }
    if (shown > kShown) text += c10::str("; and ", shown - kShown, " more");
    for (const Wait* wait : waits_) {
      if (wait->others_ && described.insert(wait->ranks_).second) text += wait->others_();
    }
    return text.ends_with('.') ? text : text + ".";
  }

  const std::chrono::milliseconds interval_ = first_interval();
  std::mutex mutex_;
  std::condition_variable nobody_;
  std::list<Wait*> waits_;  // the oldest first
  bool is_running_ = false;
};

Wait::Wait(int64_t rank, std::function<std::string()> where, const void* ranks, Others others)
    : rank_(rank), where_(std::move(where)), ranks_(ranks), others_(std::move(others)) {
  Watch::instance().add(*this);
}

Wait::~Wait() { Watch::instance().remove(*this); }

}  // namespace tessera
