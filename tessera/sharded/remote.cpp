#include <tessera/comm/rpc.h>
#include <tessera/error.h>
#include <tessera/sharded/offer.h>
#include <tessera/sharded/ranks.h>
#include <tessera/sharded/remote.h>

#include <c10/util/irange.h>
#include <torch/csrc/distributed/rpc/rref_impl.h>

namespace tessera::sharded {

LocalShard RemoteShard::to_here(std::optional<std::chrono::milliseconds> timeout) const {
  LocalShard shard;  // not checked: its placement is where it came from
  shard.tensor = tensor_.fetch(timeout);
  shard.metadata = metadata_;
  return shard;
}

rpc::RRef RemoteShard::rref() const { return tensor_.rref(); }

SharedShards share_shards(const std::vector<LocalShard>& local_shards, const Members& members) {
  SharedShards result;
  if (!members.is_member()) return result;
  const bool is_threads = members.world()->is_threads();
  std::vector<at::Tensor> tensors;
  Offer mine;
  for (const LocalShard& shard : local_shards) {
    tensors.push_back(shard.tensor);
    mine.shards.push_back(shard.metadata);
  }
  result.mine = std::make_shared<const Published>(std::move(tensors), !is_threads);
  mine.id = result.mine->id();
  if (!is_threads) mine.error = rpc::why_not(*members.world());

  const auto offers = all_gather_text(to_bytes(mine), members);
  for (const int64_t group_rank : c10::irange(members.size())) {
    const int64_t rank = members.ranks()[group_rank];
    const Offer offer = offer_from_bytes(offers[group_rank]);
    TESSERA_CHECK(offer.error.empty(), "init_rrefs: the ranks are processes, but on rank ", rank, " ",
                  offer.error, ".");
    if (rank == members.rank() || offer.shards.empty()) continue;
    const auto borrowed = std::make_shared<const Borrowed>(rank, is_threads, offer.id);
    for (const size_t i : c10::irange(offer.shards.size())) {
      const PublishedTensor tensor{rank, is_threads, offer.id, static_cast<int64_t>(i)};
      result.others[rank].emplace_back(tensor, offer.shards[i], borrowed);
    }
  }
  if (!local_shards.empty()) result.mine->lend(members.size() - 1);
  return result;
}

int64_t rank_of(const std::optional<RemoteDevice>& placement, const Members& members) {
  TESSERA_CHECK_VALUE(placement, "A shard needs a placement, such as \"rank:0/cpu\".");
  std::optional<int64_t> rank = placement->rank();
  if (const auto& worker = placement->worker_name()) {
    TESSERA_CHECK(rpc::is_initialized(), "The placement ", *placement,
                  " names a worker; RPC has to be initialized to know it. Or name a rank: \"rank:0/cpu\".");
    rank = rpc::worker_rank(*worker);
    TESSERA_CHECK_VALUE(rank, "The placement ", *placement, ": there is no worker \"", *worker, "\".");
  }
  TESSERA_CHECK_VALUE(rank, "The placement ", *placement,
                      " names a device, but not whose: expected a rank, as in \"rank:0/", placement->device(),
                      "\".");
  TESSERA_CHECK_VALUE(members.group_rank_of(*rank), "The placement ", *placement, ": rank ", *rank,
                      " is not among the ranks ", c10::IntArrayRef(members.ranks()),
                      " of the process group.");
  return *rank;
}

}  // namespace tessera::sharded
