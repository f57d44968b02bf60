#pragma once

#include <tessera/sharded/metadata.h>
#include <tessera/sharded/ranks.h>

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::sharded {

/// The parts of a tensor that this rank holds under the tiling `to`, given those that it holds under `from`,
/// each in the order of their list. Both tilings must be all of one tensor, with placements that name
/// members. Where this rank holds nothing, one empty tensor stands for that, before and after.
///
/// Collective: one all-to-all of what two boxes on different ranks share, so each element is sent once at the
/// most. Memory: the result, and a buffer each for what is sent and received; what stays on its rank needs
/// none. Differentiable, if all ranks run backward: each has something to begin with.
std::vector<at::Tensor> exchange(const std::vector<ShardMetadata>& from, const std::vector<at::Tensor>& held,
                                 const std::vector<ShardMetadata>& to, at::ScalarType dtype,
                                 const MembersPtr& members);

}  // namespace tessera::sharded
