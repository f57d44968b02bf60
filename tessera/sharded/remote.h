#pragma once

#include <tessera/export.h>
#include <tessera/sharded/published.h>
#include <tessera/sharded/shard.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <vector>

/// Access to the shards of other ranks: over RPC between processes (comm/rpc.h), directly
/// between threads of one.
namespace tessera::sharded {

class Members;

/// A shard on another rank, which keeps it as long as this one has a handle or the sharded tensor.
class TESSERA_API RemoteShard {
 public:
  RemoteShard(PublishedTensor tensor, ShardMetadata metadata, std::shared_ptr<const Borrowed> borrowed)
      : tensor_(tensor), metadata_(std::move(metadata)), borrowed_(std::move(borrowed)) {}

  /// The (global) rank that holds it.
  int64_t owner() const { return tensor_.owner; }
  const ShardMetadata& metadata() const { return metadata_; }
  /// A copy of what it holds now, in CPU memory. Only this rank has to call it; if the owner writes into the
  /// shard meanwhile, the copy may be partly old and partly new. Throws if the owner has shut down its RPC, has
  /// died, or does not answer in time (by default within the timeout of `init_rpc`).
  LocalShard to_here(std::optional<std::chrono::milliseconds> timeout = {}) const;
  /// libtorch's own reference to the shard's tensor, which keeps it on its owner. Between processes only.
  rpc::RRef rref() const;

 private:
  PublishedTensor tensor_;
  ShardMetadata metadata_;
  std::shared_ptr<const Borrowed> borrowed_;
};

/// By (global) rank; ranks that hold no shards, and this one, are not in it.
using RemoteShards = std::map<int64_t, std::vector<RemoteShard>>;

/// What ranks know of each other's shards.
struct SharedShards {
  std::shared_ptr<const Published> mine = {};
  RemoteShards others = {};
};

/// Exchanges references to shards among all members. Collective over the members; throws on all
/// of them if one has no RPC and needs it. Nothing on other ranks.
TESSERA_API SharedShards share_shards(const std::vector<LocalShard>& local_shards, const Members& members);

/// The (global) rank that a placement names. Throws if it names none, or one that is not among the members.
TESSERA_API int64_t rank_of(const std::optional<RemoteDevice>& placement, const Members& members);

}  // namespace tessera::sharded
