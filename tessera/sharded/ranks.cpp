#include <tessera/bytes.h>
#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/sharded/ranks.h>

#include <algorithm>
#include <numeric>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/irange.h>

namespace tessera::sharded {

Ranks::Ranks() = default;
Ranks::Ranks(Group group) : group_(std::move(group)) {}
Ranks::Ranks(Group group, std::vector<int64_t> ranks) : group_(std::move(group)), ranks_(std::move(ranks)) {}
Ranks::Ranks(std::vector<int64_t> ranks) : ranks_(std::move(ranks)) {}
Ranks::Ranks(std::initializer_list<int64_t> ranks) : ranks_(ranks) {}
Ranks::Ranks(const Ranks&) = default;
Ranks& Ranks::operator=(const Ranks&) = default;
Ranks::~Ranks() = default;

Members::Members(const Ranks& ranks, c10::DeviceType device) : world_(current_world()) {
  if (ranks.group_) {
    group_ = ranks.group_;
    if (const auto known = world_->ranks_of(group_)) {
      ranks_ = *known;
    } else if (ranks.ranks_) {
      ranks_ = *ranks.ranks_;
    } else {
      const at::Tensor mine = at::full({1}, world_->rank(), at::kLong);
      const at::Tensor all = at::empty({group_->getSize()}, at::kLong);
      comm::all_gather_into(all, mine, group_).wait();
      ranks_.assign(all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel());
    }
  } else if (ranks.ranks_) {
    ranks_ = *ranks.ranks_;
    TESSERA_CHECK_VALUE(!ranks_.empty(), "A sharded tensor needs at least one rank.");
    for (const int64_t rank : ranks_) {
      TESSERA_CHECK_VALUE(rank >= 0 && rank < world_->size(), "A sharded tensor on ranks ",
                          c10::IntArrayRef(ranks_), ": there is no rank ", rank, " in a world of ",
                          world_->size(), ".");
    }
  } else {
    ranks_.resize(world_->size());
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
  group_rank_ = group_rank_of(world_->rank()).value_or(-1);
  if (!group_ && is_member()) group_ = world_->group(ranks_, device);
}

Members::~Members() = default;

std::optional<int64_t> Members::group_rank_of(int64_t rank) const {
  // Most groups are all ranks, in order.
  if (rank >= 0 && rank < size() && ranks_[rank] == rank) return rank;
  const auto found = std::find(ranks_.begin(), ranks_.end(), rank);
  if (found == ranks_.end()) return std::nullopt;
  return found - ranks_.begin();
}

c10::Device Members::device() const {
  const auto types = group_->getDeviceTypes();
  if (types.empty() || std::find(types.begin(), types.end(), c10::Device(c10::kCPU)) != types.end())
    return c10::kCPU;
  return c10::impl::getDeviceGuardImpl(types[0].type())->getDevice();
}

void Members::check_member(const char* what) const {
  TESSERA_CHECK(is_member(), what, ": rank ", rank(), " is not among the ranks ", c10::IntArrayRef(ranks_),
                " that share this sharded tensor.");
}

bool Members::operator==(const Members& other) const {
  return world_ == other.world_ && ranks_ == other.ranks_ && group_ == other.group_;
}

std::vector<std::string> all_gather_text(const std::string& mine, const Members& members) {
  if (members.size() == 1) return {mine};
  const at::TensorOptions numbers = at::TensorOptions(at::kLong).device(members.device());
  const at::Tensor all_sizes = at::empty({members.size()}, numbers);
  comm::all_gather_into(all_sizes, at::full({1}, static_cast<int64_t>(mine.size()), numbers), members.group())
      .wait();
  const at::Tensor sizes = all_sizes.to(at::kCPU);
  at::Tensor bytes = at::empty({static_cast<int64_t>(mine.size())}, at::kByte);
  copy_bytes(bytes.mutable_data_ptr(), mine.data(), mine.size());
  comm::Tensors received;
  for (const int64_t i : c10::irange(members.size()))
    received.push_back(at::empty({sizes.const_data_ptr<int64_t>()[i]}, numbers.dtype(at::kByte)));
  comm::all_gather(received, bytes.to(members.device()), members.group()).wait();
  std::vector<std::string> result;
  for (const at::Tensor& part : received) {
    const at::Tensor here = part.to(at::kCPU);
    result.emplace_back(static_cast<const char*>(here.const_data_ptr()), here.numel());
  }
  return result;
}

bool all_agree(bool mine, const Members& members) {
  const at::Tensor vote = at::full({1}, mine, at::TensorOptions(at::kBool).device(members.device()));
  comm::Tensors votes;
  for (int64_t i = 0; i < members.size(); ++i) votes.push_back(at::empty_like(vote));
  comm::all_to_all(votes, comm::Tensors(votes.size(), vote), members.group()).wait();
  return std::all_of(votes.begin(), votes.end(), [](const at::Tensor& each) { return each.item<bool>(); });
}

}  // namespace tessera::sharded
