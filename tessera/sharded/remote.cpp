#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/sharded/ranks.h>
#include <tessera/sharded/remote.h>

#include <mutex>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

std::mutex mutex;

RemoteAccess& access() {
  static auto& instance = *new RemoteAccess;
  return instance;
}

RemoteAccess current_access() {
  const std::lock_guard lock(mutex);
  return access();
}

/// Of a rank that is another thread of this process.
class ThreadShard final : public RemoteShard {
 public:
  ThreadShard(int64_t owner, Shard shard) : owner_(owner), shard_(std::move(shard)) {}
  int64_t owner() const override { return owner_; }
  const ShardMetadata& metadata() const override { return shard_.metadata; }
  Shard to_here() const override { return {shard_.tensor.detach().clone(), shard_.metadata}; }

 private:
  int64_t owner_;
  Shard shard_;
};

/// Threads tell one another where their lists are, and wait until all have read them.
RemoteShards share_among_threads(const std::vector<Shard>& local_shards, const Members& members) {
  const at::Tensor mine = at::full({1}, reinterpret_cast<int64_t>(&local_shards), at::kLong);
  const at::Tensor all = at::empty({members.size()}, at::kLong);
  comm::all_gather_into(all, mine, members.group()).wait();
  RemoteShards result;
  for (const int64_t i : c10::irange(members.size())) {
    if (i == members.group_rank()) continue;
    const auto& shards = *reinterpret_cast<const std::vector<Shard>*>(all.const_data_ptr<int64_t>()[i]);
    for (const Shard& shard : shards)
      result[members.ranks()[i]].push_back(std::make_shared<ThreadShard>(members.ranks()[i], shard));
  }
  comm::barrier(members.group()).wait();
  return result;
}

}  // namespace

RemoteShard::~RemoteShard() = default;

void set_remote_access(RemoteAccess given) {
  const std::lock_guard lock(mutex);
  access() = std::move(given);
}

RemoteShards share_shards(const std::vector<Shard>& local_shards, const Members& members) {
  if (!members.is_member()) return {};
  if (members.world()->is_threads()) return share_among_threads(local_shards, members);
  const auto share = current_access().share;
  TESSERA_CHECK(share,
                "init_rrefs: these ranks are processes, and nothing is set up by which they could reach each "
                "other's shards. Initialize RPC first, or leave init_rrefs out.");
  return share(local_shards, members);
}

int64_t rank_of(const std::optional<RemoteDevice>& placement, const Members& members) {
  TESSERA_CHECK_VALUE(placement, "A shard needs a placement, such as \"rank:0/cpu\".");
  std::optional<int64_t> rank = placement->rank();
  if (const auto& worker = placement->worker_name()) {
    const auto find = current_access().rank_of_worker;
    TESSERA_CHECK(find, "The placement ", *placement,
                  " names a worker; RPC has to be initialized to know it. Or name a rank: \"rank:0/cpu\".");
    rank = find(*worker);
    TESSERA_CHECK_VALUE(rank, "The placement ", *placement, ": there is no worker \"", *worker, "\".");
  }
  TESSERA_CHECK_VALUE(rank, "The placement ", *placement,
                      " names a device, but not whose: expected a rank, as in \"rank:0/", placement->device(),
                      "\".");
  TESSERA_CHECK_VALUE(members.place_of(*rank), "The placement ", *placement, ": rank ", *rank,
                      " is not among the ranks ", c10::IntArrayRef(members.ranks()),
                      " of the process group.");
  return *rank;
}

}  // namespace tessera::sharded
