#pragma once

#include <tessera/comm/world.h>
#include <tessera/export.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace tessera::sharded {

/// Which ranks share a tensor, as callers say it: all of the current world, those of a group, or those with
/// these global ranks. Ranks that are not among them may pass the same list: they get a tensor
/// of which they hold nothing.
class TESSERA_API Ranks {
 public:
  Ranks();
  Ranks(Group group);
  /// The same, where its global ranks are known: then they need not be exchanged.
  Ranks(Group group, std::vector<int64_t> ranks);
  Ranks(std::vector<int64_t> ranks);
  Ranks(std::initializer_list<int64_t> ranks);
  Ranks(const Ranks&);
  Ranks& operator=(const Ranks&);
  ~Ranks();

 private:
  friend class Members;
  Group group_;
  std::optional<std::vector<int64_t>> ranks_;
};

/// The ranks that share a tensor, seen from one rank, whether it is among them or not.
class TESSERA_API Members {
 public:
  /// For tensors on `device`. Throws if there is no world, or a rank is outside it. A group that the world
  /// did not make exchanges its ranks, which is collective.
  Members(const Ranks& ranks, c10::DeviceType device);
  ~Members();

  const std::shared_ptr<World>& world() const { return world_; }
  /// Null on other ranks.
  const Group& group() const { return group_; }
  /// Global ranks, in the order of the group.
  const std::vector<int64_t>& ranks() const { return ranks_; }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  /// This rank's global rank, and its rank in the group: -1 if it is not in it.
  int64_t rank() const { return world_->rank(); }
  int64_t group_rank() const { return group_rank_; }
  bool is_member() const { return group_rank_ >= 0; }
  /// The rank in the group of a global rank, or nothing.
  std::optional<int64_t> group_rank_of(int64_t rank) const;

  /// Where tensors for collectives of the group must lie.
  c10::Device device() const;

  /// Throws, naming `what`, on ranks that are not among them.
  void check_member(const char* what) const;

  bool operator==(const Members& other) const;

 private:
  std::shared_ptr<World> world_;
  std::vector<int64_t> ranks_;
  Group group_;
  int64_t group_rank_ = -1;
};

using MembersPtr = std::shared_ptr<const Members>;

/// Each rank's text, by rank in the group. Collective.
TESSERA_API std::vector<std::string> all_gather_text(const std::string& mine, const Members& members);

/// Whether all ranks say yes. Collective.
TESSERA_API bool all_agree(bool mine, const Members& members);

}  // namespace tessera::sharded
