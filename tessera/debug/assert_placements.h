#pragma once

#include <tessera/export.h>
#include <tessera/placement/placement.h>

#include <ATen/core/Tensor.h>

namespace tessera {

/// Throws unless `tensor` is distributed with these placements, and says how to bring it there. Communicates nothing.
///   assert_placements(x, {Shard(0), Replicate()});
TESSERA_API void assert_placements(const at::Tensor& tensor, Placements placements);

}  // namespace tessera
