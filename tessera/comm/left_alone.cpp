#include <tessera/comm/left_alone.h>

#include <future>
#include <thread>

namespace tessera {

void do_for_at_most(std::chrono::milliseconds patience, std::function<void()> work) {
  std::packaged_task<void()> task(std::move(work));
  const auto done = task.get_future();
  std::thread([task = std::move(task)]() mutable {
    task();
    task = {};  // and what it holds
  }).detach();
  done.wait_for(patience);
}

}  // namespace tessera
