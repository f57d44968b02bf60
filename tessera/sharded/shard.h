#pragma once

#include <tessera/export.h>
#include <tessera/sharded/metadata.h>

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::sharded {

/// One box of a sharded tensor with its data: PyTorch's Shard, which here is a placement (placement.h).
struct TESSERA_API LocalShard {
  at::Tensor tensor;
  ShardMetadata metadata;

  LocalShard() = default;
  /// Throws unless the tensor has the size that the metadata says, and lies on the device of its placement,
  /// if it has one.
  LocalShard(at::Tensor tensor, ShardMetadata metadata);

  /// A shard of the size and on the device of `tensor`, at these offsets, of that global rank.
  static LocalShard from_tensor_and_offsets(at::Tensor tensor, std::vector<int64_t> offsets, int64_t rank);
};

}  // namespace tessera::sharded
