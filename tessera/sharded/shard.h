#pragma once

#include <tessera/export.h>
#include <tessera/sharded/metadata.h>

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::sharded {

/// One box of a sharded tensor with its data.
struct TESSERA_API Shard {
  at::Tensor tensor;
  ShardMetadata metadata;

  Shard() = default;
  /// Throws unless the tensor has the size that the metadata says, and lies on the device of its placement,
  /// if it has one.
  Shard(at::Tensor tensor, ShardMetadata metadata);

  /// A shard of its size, at that place, on its device of that (global) rank.
  static Shard from_tensor_and_offsets(at::Tensor tensor, std::vector<int64_t> offsets, int64_t rank);
};

}  // namespace tessera::sharded
