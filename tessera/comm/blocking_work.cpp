#include <tessera/comm/blocking_work.h>

#include <algorithm>

namespace tessera::comm {

bool BlockingWork::wait(std::chrono::milliseconds timeout) {
  std::lock_guard lock(waiting_);
  if (!is_finished()) {
    try {
      complete(timeout);
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> BlockingWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  try {
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(results_));
  } catch (...) {
    future->setError(std::current_exception());
  }
  return future;
}

void AllOfWork::complete(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
}

bool AllOfWork::is_ready() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

}  // namespace tessera::comm
