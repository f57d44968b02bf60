#pragma once

#include <tessera/comm/threads/exchange.h>
#include <tessera/comm/threads/mailbox.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::threads {

inline constexpr const char* kBackendName = "threads";

/// What the members of one group share.
struct MeetingPoint {
  MeetingPoint(std::vector<int64_t> members, bool crowded)
      : exchange(std::move(members), crowded), mailbox(exchange) {}
  Exchange exchange;
  Mailbox mailbox;
};

/// What the ranks of one `run` share: a meeting point per group, a store, and the news of who failed or
/// ended.
class Hub {
 public:
  explicit Hub(int64_t size);

  /// The one meeting point of these ranks in this order; `name` tells apart groups of the same ranks.
  std::shared_ptr<MeetingPoint> meeting_point(const std::vector<int64_t>& ranks, const std::string& name);

  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  /// Rank `rank` has failed: everyone who waits, anywhere, gets an error that says so. The first one counts.
  void fail(int64_t rank, const std::string& reason);
  std::string failure() const;

  /// Rank `rank` has ended well: those who wait for it, or ever do, get an error.
  void leave(int64_t rank);

 private:
  const bool crowded_;
  c10::intrusive_ptr<c10d::Store> store_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::vector<int64_t>, std::string>, std::shared_ptr<MeetingPoint>> points_;
  std::string failure_;
  std::vector<bool> left_;
};

}  // namespace tessera::threads
