#pragma once

#include <tessera/dtensor/dtensor.h>
#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

namespace tessera::sharded {

/// The same tensor as a DTensor placed so. Its local tensor is this rank's shard, without copying or moving
/// data, if every rank has in one shard what the placements give it; else the tensor is resharded so first,
/// which is one exchange. Collective: the ranks compare what they ask for. Differentiable. Throws, on every
/// rank, if the placements replicate or are partial (redistribute afterwards), if some rank would hold more
/// than one box, or if the mesh has other ranks than the tensor's group.
TESSERA_API DTensor to_dtensor(const ShardedTensor& tensor, const DeviceMesh& mesh, Placements placements);

/// On the 1-d mesh of the tensor's ranks, in the order of their chunks if it has one chunk for each,
/// then without copying; else sharded along dim 0.
TESSERA_API DTensor to_dtensor(const ShardedTensor& tensor);

/// The same tensor as a sharded one: what a rank holds is its shard, without copying where it is one
/// contiguous box. Of replicas the first is taken. Not collective. Differentiable. Throws if the tensor is
/// partial: reduce it first.
TESSERA_API ShardedTensor from_dtensor(const DTensor& tensor);

}  // namespace tessera::sharded
