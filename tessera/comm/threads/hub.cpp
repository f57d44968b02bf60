#include <tessera/comm/threads/hub.h>
#include <tessera/error.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::threads {

namespace {

void notify_left(MeetingPoint& point, int64_t rank) {
  const auto& members = point.collectives.members();
  const auto member = std::find(members.begin(), members.end(), rank);
  if (member != members.end()) point.collectives.leave(member - members.begin());
}

}  // namespace

Hub::Hub(int64_t size)
    : crowded_(size > static_cast<int64_t>(std::thread::hardware_concurrency())),
      roster_(std::make_shared<Roster>(size)),
      forward_ad_(size, crowded_, *roster_),
      met_{std::vector<std::string>(size), std::vector<std::string>(size)},
      store_(c10::make_intrusive<c10d::HashStore>()),
      left_(size) {}

Hub::~Hub() { roster_->forget_groups(); }

std::shared_ptr<MeetingPoint> Hub::meeting_point(const std::vector<int64_t>& ranks, const std::string& name) {
  std::lock_guard lock(mutex_);
  auto& point = points_[{ranks, name}];
  if (!point) {
    point = std::make_shared<MeetingPoint>(ranks, crowded_, roster_);
    if (!failure_.empty()) point->collectives.abort(failure_);
    for (size_t rank = 0; rank < left_.size(); ++rank) {
      if (left_[rank]) notify_left(*point, static_cast<int64_t>(rank));
    }
  }
  return point;
}

void Hub::fail(int64_t rank, const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) return;
  failure_ = c10::str("rank ", rank, " failed: ", reason);
  for (auto& [key, point] : points_) point->collectives.abort(failure_);
  forward_ad_.abort(failure_);
}

std::string Hub::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Hub::leave(int64_t rank) {
  {
    std::lock_guard lock(mutex_);
    left_[rank] = true;
    for (auto& [key, point] : points_) notify_left(*point, rank);
  }
  roster_->leave(rank);
}

void Hub::meet(int64_t rank, const std::string& what, std::chrono::milliseconds timeout) {
  std::vector<int64_t> all(left_.size());
  std::iota(all.begin(), all.end(), 0);
  GroupCollectives& collectives = meeting_point(all, "meet")->collectives;
  CollectiveCall call;
  call.kind = comm::Collective::barrier;
  // Those who are not yet through with one meeting still read what was said there when others come to the
  // next, but not when they come to the one after.
  auto& said = met_[collectives.posted(rank) % 2];
  said[rank] = what;
  const uint64_t number = collectives.post(rank, std::move(call), timeout);
  collectives.wait(rank, number, timeout, [&] {
    return what + ", which all ranks of a process do together as it is one for the process";
  });
  const auto other = std::find_if(said.begin(), said.end(), [&](const auto& text) { return text != what; });
  TESSERA_CHECK(other == said.end(), "Rank ", rank, " calls ", what, ", but rank ", other - said.begin(),
                " calls ", *other,
                ". Both are one for the process, so ranks that are threads must make the same such calls.");
}

namespace {
std::atomic<int> runs{0};
}

RunCount::RunCount() { ++runs; }
RunCount::~RunCount() { --runs; }

void check_only_run(const std::string& what) {
  TESSERA_CHECK(runs <= 1, what, ": it is one for the process, in which ", runs.load(),
                " runs of ranks as threads are under way. Do it before they start, or use processes.");
}

}  // namespace tessera::threads
