#pragma once

#include <tessera/comm/threads/group_collectives.h>
#include <tessera/comm/threads/mailbox.h>
#include <tessera/comm/threads/shared_scope.h>

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::threads {

/// What the members of one group share.
struct MeetingPoint {
  MeetingPoint(std::vector<int64_t> members, bool crowded, std::shared_ptr<Roster> roster)
      : collectives(std::move(members), crowded, std::move(roster)), mailbox(collectives) {}
  GroupCollectives collectives;
  Mailbox mailbox;
};

/// What the ranks of one `run` share: a meeting point per group, a store, and who failed or
/// ended.
class Hub {
 public:
  explicit Hub(int64_t size);
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  Roster& roster() { return *roster_; }

  /// The one meeting point of these ranks in this order; `name` distinguishes groups of the same ranks.
  std::shared_ptr<MeetingPoint> meeting_point(const std::vector<int64_t>& ranks, const std::string& name);

  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  /// Rank `rank` has failed: everyone who waits, anywhere, gets an error that says so. The first one counts.
  void fail(int64_t rank, const std::string& reason);
  std::string failure() const;

  /// Rank `rank` has ended well: those who wait for it, or ever do, get an error.
  void leave(int64_t rank);

  /// Waits until all ranks are here, all with the same `what`. An error on all of them if they are not.
  void meet(int64_t rank, const std::string& what, std::chrono::milliseconds timeout);

  /// The scope in which ranks do forward-mode AD.
  SharedScope& forward_ad() { return forward_ad_; }

 private:
  const bool crowded_;
  const std::shared_ptr<Roster> roster_;
  SharedScope forward_ad_;
  std::array<std::vector<std::string>, 2> met_;  // by turns, by rank: what it said at `meet`
  c10::intrusive_ptr<c10d::Store> store_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::vector<int64_t>, std::string>, std::shared_ptr<MeetingPoint>> points_;
  std::string failure_;
  std::vector<bool> left_;
};

/// While alive, counts as one `run` that is under way in this process.
class RunCount {
 public:
  RunCount();
  ~RunCount();
  RunCount(const RunCount&) = delete;
  RunCount& operator=(const RunCount&) = delete;
};

/// Throws if several runs are under way in this process, as then the ranks of one of them cannot have `what`,
/// which is process-wide, for themselves.
void check_only_run(const std::string& what);

}  // namespace tessera::threads
