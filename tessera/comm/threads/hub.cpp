#include <tessera/comm/threads/hub.h>

#include <algorithm>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::threads {

namespace {

void tell_left(MeetingPoint& point, int64_t rank) {
  const auto& members = point.exchange.members();
  const auto member = std::find(members.begin(), members.end(), rank);
  if (member != members.end()) point.exchange.leave(member - members.begin());
}

}  // namespace

Hub::Hub(int64_t size)
    : crowded_(size > static_cast<int64_t>(std::thread::hardware_concurrency())),
      store_(c10::make_intrusive<c10d::HashStore>()),
      left_(size) {}

std::shared_ptr<MeetingPoint> Hub::meeting_point(const std::vector<int64_t>& ranks, const std::string& name) {
  std::lock_guard lock(mutex_);
  auto& point = points_[{ranks, name}];
  if (!point) {
    point = std::make_shared<MeetingPoint>(ranks, crowded_);
    if (!failure_.empty()) point->exchange.abort(failure_);
    for (size_t rank = 0; rank < left_.size(); ++rank) {
      if (left_[rank]) tell_left(*point, static_cast<int64_t>(rank));
    }
  }
  return point;
}

void Hub::fail(int64_t rank, const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) return;
  failure_ = c10::str("rank ", rank, " failed: ", reason);
  for (auto& [key, point] : points_) point->exchange.abort(failure_);
}

std::string Hub::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Hub::leave(int64_t rank) {
  std::lock_guard lock(mutex_);
  left_[rank] = true;
  for (auto& [key, point] : points_) tell_left(*point, rank);
}

}  // namespace tessera::threads
