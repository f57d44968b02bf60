#include <tessera/comm/blocking_work.h>
#include <tessera/comm/threads/group_collectives.h>
#include <tessera/comm/threads/shared_scope.h>
#include <tessera/error.h>

#include <algorithm>
#include <optional>
#include <thread>

#include <c10/util/irange.h>

namespace tessera::threads {

std::vector<int64_t> SharedScope::inside() const {
  std::vector<int64_t> ranks;
  for (const size_t i : c10::irange(is_inside_.size())) {
    if (is_inside_[i]) ranks.push_back(static_cast<int64_t>(i));
  }
  return ranks;
}

void SharedScope::enter(int64_t rank, c10::function_ref<void()> begin) {
  std::unique_lock lock(mutex_);
  while (is_ending_) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  if (inside().empty()) begin();
  is_inside_[rank] = true;
}

void SharedScope::leave(int64_t rank, const std::string& what, std::chrono::milliseconds timeout,
                        bool is_failing, c10::function_ref<void()> end) {
  uint64_t before = 0;
  {
    std::unique_lock lock(mutex_);
    before = ends_;
    is_inside_[rank] = false;
    if (inside().empty()) {
      is_ending_ = true;
      lock.unlock();
      end();
      lock.lock();
      is_ending_ = false;
      ++ends_;
    }
  }
  room_.wake();
  if (is_failing) return;
  auto has_ended = [&] {
    const std::lock_guard lock(mutex_);
    return ends_ != before || !reason_.empty();
  };
  auto awaited = [&]() -> std::optional<std::vector<int64_t>> {
    if (has_ended()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    return inside();
  };
  std::optional<Roster::Sleeping> sleeping;
  const bool in_time = room_.wait_for(timeout, has_ended, [&] {
    sleeping.emplace(roster_, Roster::Sleep{.rank = rank,
                                            .where = c10::str("at the end of ", what, ","),
                                            .awaited = awaited,
                                            .fail = [this](const std::string& reason) { abort(reason); }});
  });
  sleeping.reset();
  const std::lock_guard lock(mutex_);
  if (ends_ != before) return;
  const std::string text = c10::str("Rank ", rank, " cannot leave ", what,
                                    ", which is one for the process and ends when all ranks have left it: ");
  if (!reason_.empty()) throw comm::PeerError(text + reason_ + ".");
  TESSERA_CHECK(in_time, text, "rank ", inside().front(), " has not after ", timeout.count(), " ms.");
}

void SharedScope::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = reason;
  }
  room_.wake();
}

}  // namespace tessera::threads
