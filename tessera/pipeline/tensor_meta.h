#pragma once

#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/spec.h>

#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

namespace tessera {

/// Everything that a stage must know of a tensor before it can receive it. A distributed one is sent as its local
/// tensor, to the rank of the next stage that has the same coordinate on the other mesh dims, and is there distributed in
/// the same way over the ranks of that stage.
struct TensorMeta {
  at::ScalarType dtype = at::kFloat;
  c10::DimVector sizes;  // of a plain tensor
  Spec spec;             // of a distributed one, else undefined
  bool requires_grad = false;

  static TensorMeta of(const at::Tensor& tensor);
  /// Of the gradient, as it is sent: contiguous, replicated where the tensor is partial.
  TensorMeta of_gradient() const;

  /// Memory for the local tensor.
  at::Tensor empty_local(at::DeviceType device) const;
  /// The tensor whose local tensor that is. Not a leaf of any graph.
  at::Tensor wrap(const at::Tensor& local) const;

  std::string str() const;
  bool operator==(const TensorMeta&) const = default;
};

using TensorMetas = std::vector<TensorMeta>;

/// What is sent of a tensor. Shares its memory.
at::Tensor local_of(const at::Tensor& tensor);

/// As bytes, for a rank of another stage. Throws, for stage `stage`, if a tensor is distributed on a mesh that the other
/// stages have no equal of: it must consist of named dims of the root of `pipeline`, the mesh of the stages, but its own.
std::string to_bytes(const TensorMetas& metas, const DeviceMesh& pipeline, int64_t stage);
/// On this rank's own part of that root.
TensorMetas from_bytes(std::string_view bytes, const DeviceMesh& pipeline);

}  // namespace tessera
