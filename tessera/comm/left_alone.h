#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace tessera {

/// Does `work`, which does not throw, on a thread of its own, and returns when that is done or so much time has passed. Then
/// the thread is left alone: for what nobody can end.
void do_for_at_most(std::chrono::milliseconds patience, std::function<void()> work);

/// What `ask` returns or throws, on a thread of its own; nothing if that takes longer. Then the thread is left alone, too. For
/// questions to a store: libtorch's waits for the answer without a limit, and who keeps it may be stopped.
template <class Ask>
std::optional<std::invoke_result_t<Ask>> ask_for_at_most(std::chrono::milliseconds patience, Ask ask) {
  std::packaged_task<std::invoke_result_t<Ask>()> task(std::move(ask));
  auto answer = task.get_future();
  std::thread([task = std::move(task)]() mutable { task(); }).detach();
  if (answer.wait_for(patience) != std::future_status::ready) return std::nullopt;
  return answer.get();
}

}  // namespace tessera
