#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/placement.h>

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

/// What flows between parallel modules: styles make it distributed, and redistribute it.
namespace tessera {

/// Where a style applies.
struct TESSERA_API ParallelDim {
  DeviceMesh mesh;
  int64_t dim = 0;
  /// The rank of the mesh whose parameters count; none: each rank takes its shard of its own.
  std::optional<int64_t> source = 0;

  /// Replicate but for this dim.
  Placements placements(const Placement& along) const;
};

struct ActivationLayout {
  /// What a plain tensor is the local tensor of.
  Placement if_plain;
  /// What to redistribute to; none: nothing.
  std::optional<Placement> desired = {};
  /// The global size of the last dim. A plain tensor that is sharded there then needs no exchange of sizes.
  std::optional<int64_t> features = {};
  /// Redistribute its gradient to the placements that it came with (P as R), whatever computes it: where
  /// ranks have partial values of the gradient, they are reduced here, once for all layers that are called
  /// with the same distributed tensor one after the other.
  bool reduce_gradient = false;
};

/// `tensor` as a distributed tensor with that layout along `where.dim`, and as it is along the others. A
/// plain tensor is a local tensor; if it is sharded, ranks exchange their sizes, as shards may be uneven. On
/// a mesh of several dims it is an error, as is a tensor that is distributed on another mesh; the message
/// begins with `what`.
TESSERA_API at::Tensor prepare_activation(const at::Tensor& tensor, const ParallelDim& where,
                                          const ActivationLayout& layout, const std::string& what);

}  // namespace tessera
