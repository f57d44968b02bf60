#pragma once

#include <tessera/export.h>
#include <tessera/sharded/shard.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Shards that other ranks hold, where one asks for them: between threads of a process directly, between
/// processes by what `set_remote_access` was given.
namespace tessera::sharded {

class Members;

/// A shard on another rank.
class TESSERA_API RemoteShard {
 public:
  virtual ~RemoteShard();
  /// The (global) rank that holds it.
  virtual int64_t owner() const = 0;
  virtual const ShardMetadata& metadata() const = 0;
  /// A copy of what it holds now. Only this rank has to call it.
  virtual Shard to_here() const = 0;
};

/// By (global) rank; ranks that hold no shards, and this one, are not in it.
using RemoteShards = std::map<int64_t, std::vector<std::shared_ptr<const RemoteShard>>>;

/// How ranks that are processes reach each other's shards.
struct RemoteAccess {
  /// Tells all ranks of this rank's shards, and is told of theirs. Collective over the members.
  std::function<RemoteShards(const std::vector<Shard>& local_shards, const Members& members)> share;
  /// The (global) rank of the worker of that name, or nothing.
  std::function<std::optional<int64_t>(const std::string& worker)> rank_of_worker;
};
TESSERA_API void set_remote_access(RemoteAccess access);

/// What `share` gives, or, between threads, the shards themselves. Throws if there is no way.
RemoteShards share_shards(const std::vector<Shard>& local_shards, const Members& members);

/// The (global) rank that a placement names. Throws if it names none, or one that is not among the members.
int64_t rank_of(const std::optional<RemoteDevice>& placement, const Members& members);

}  // namespace tessera::sharded
