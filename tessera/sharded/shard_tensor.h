#pragma once

#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

namespace tessera::sharded {

/// `spec.shard(tensor, src_rank, process_group)`, after all ranks have been found to ask for the same.
/// Collective. Throws, on every rank, if they do not, and if the tensor is not contiguous.
TESSERA_API ShardedTensor shard_tensor(const at::Tensor& tensor, const ShardingSpec& spec,
                                       int64_t src_rank = 0, const Ranks& process_group = {});

}  // namespace tessera::sharded
