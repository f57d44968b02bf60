#pragma once

#include <tessera/random/fill.h>
#include <tessera/sharded/sharded_tensor.h>

namespace tessera::sharded {

/// Fills the local shards with random numbers that depend on the seed, the call and the index in the global
/// tensor, not on its sharding (docs/random.md). One call of the ranks' generator, so all of them must make
/// it.
void fill_random(const ShardedTensor& tensor, const random::Distribution& distribution);

}  // namespace tessera::sharded
