#pragma once

#include <tessera/sharded/metadata.h>
#include <tessera/sharded/ranks.h>

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::sharded {

/// The local shards of this rank under the tiling `to`, given those under the tiling `from`, each in the
/// order of their list. Both tilings must cover one tensor, with placements that name members. On a rank
/// without shards, one empty tensor stands for them, before and after.
///
/// Collective: one all-to-all of the overlaps of boxes on different ranks, so each element is sent at most
/// once. Memory: the result, and a buffer each for what is sent and received; what stays on its rank needs
/// none. Differentiable, if all ranks run backward: each has something to begin with.
std::vector<at::Tensor> exchange(const std::vector<ShardMetadata>& from,
                                 const std::vector<at::Tensor>& locals, const std::vector<ShardMetadata>& to,
                                 at::ScalarType dtype, const MembersPtr& members);

}  // namespace tessera::sharded
