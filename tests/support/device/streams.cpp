#include "tests/support/device/streams.h"

#include <thread>
#include <utility>

namespace tessera::testing::device {

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<std::chrono::milliseconds::rep>& lag_count() {
  static std::atomic<std::chrono::milliseconds::rep> instance = 2;
  return instance;
}

/// Does the work that nobody waits for. Its destructor ends the thread before libtorch goes away.
class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  void add(Stream& stream, uint64_t number) {
    {
      const std::lock_guard lock(mutex_);
      if (ends_) return;
      due_.push_back({&stream, number, Clock::now()});
    }
    changed_.notify_one();
  }

 private:
  struct Due {
    Stream* stream;
    uint64_t number;
    Clock::time_point submitted;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (!ends_) {
      if (due_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const Due first = due_.front();
      if (!first.stream->is_done(first.number) && Clock::now() < first.submitted + lag()) {
        changed_.wait_for(lock, std::chrono::milliseconds(1));
        continue;
      }
      due_.pop_front();
      lock.unlock();
      first.stream->wait(first.number);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Due> due_;
  bool ends_ = false;
  std::thread thread_;
};

Worker& worker() {
  static Worker instance;
  return instance;
}

}  // namespace

uint64_t Stream::submit(Work work) {
  uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    number = ++submitted_;
  }
  worker().add(*this, number);
  return number;
}

uint64_t Stream::submitted() const {
  const std::lock_guard lock(mutex_);
  return submitted_;
}

bool Stream::is_done(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return done_ >= number;
}

void Stream::wait(uint64_t number) {
  std::unique_lock lock(mutex_);
  while (done_ < number) {
    if (is_working_) {
      changed_.wait(lock);
      continue;
    }
    is_working_ = true;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // what it holds may be memory of this device
    lock.lock();
    is_working_ = false;
    ++done_;
    changed_.notify_all();
  }
}

std::chrono::milliseconds lag() { return std::chrono::milliseconds(lag_count().load()); }

LagScope::LagScope(std::chrono::milliseconds lag) : previous_(lag_count().exchange(lag.count())) {}
LagScope::~LagScope() { lag_count() = previous_.count(); }

}  // namespace tessera::testing::device
