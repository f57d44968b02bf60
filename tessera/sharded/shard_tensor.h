#pragma once

#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

namespace tessera::sharded {

/// `spec.shard(tensor, src_rank, process_group)`, after checking that all ranks give the same arguments.
/// Collective. Throws, on every rank, if they do not, and if the tensor is not contiguous.
TESSERA_API ShardedTensor shard_tensor(const at::Tensor& tensor, const ShardingSpec& spec,
                                       int64_t src_rank = 0, const Ranks& process_group = {});

}  // namespace tessera::sharded
