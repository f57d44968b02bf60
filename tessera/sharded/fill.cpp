#include <tessera/random/generator.h>
#include <tessera/sharded/fill.h>

namespace tessera::sharded {

void fill_random(const ShardedTensor& tensor, const random::Distribution& distribution) {
  const Members& members = tensor.process_group();
  const DeviceMesh mesh(tensor.device().type(), {members.size()}, members.ranks(), {}, members.world());
  const random::Draw draw = random::default_generator(mesh).next();
  for (const LocalShard& shard : tensor.local_shards()) {
    random::Region region;
    region.shape = c10::DimVector(tensor.sizes());
    for (int64_t dim = 0; dim < shard.metadata.dim(); ++dim) {
      Pieces pieces;
      if (shard.metadata.shard_sizes[dim] > 0)
        pieces.push_back({shard.metadata.shard_offsets[dim], shard.metadata.shard_sizes[dim]});
      region.pieces.push_back(std::move(pieces));
    }
    if (shard.tensor.numel() > 0) random::fill(shard.tensor.detach(), region, distribution, draw);
  }
}

}  // namespace tessera::sharded
