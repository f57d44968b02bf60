#pragma once

#include <tessera/export.h>
#include <tessera/sharded/boxes.h>
#include <tessera/sharded/metadata.h>

#include <vector>

#include <c10/util/ArrayRef.h>

namespace tessera::sharded {

inline Box box_of(const ShardMetadata& shard) { return {shard.shard_offsets, shard.shard_sizes}; }
TESSERA_API std::vector<Box> boxes_of(const std::vector<ShardMetadata>& shards);

/// Throws, naming two shards and an element that both hold, if any two overlap, or if they differ in their
/// number of dims. Empty shards overlap none. Near-linear in the number of shards; see
/// for_each_overlap.
TESSERA_API void validate_non_overlapping_shards_metadata(const std::vector<ShardMetadata>& shards);

/// Throws unless the shards, which do not overlap, are together all of a tensor of that size: names the shard
/// that reaches beyond it, or an element that none holds. Shards that hold nothing may lie anywhere.
TESSERA_API void check_tensor(const std::vector<ShardMetadata>& shards, c10::IntArrayRef size);

}  // namespace tessera::sharded
