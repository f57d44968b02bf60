#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/thread_scope.h>

#include <optional>

namespace tessera {

/// While it lives, what autograd of the calling thread saves for backward, where it is replicated along a dim
/// of the mesh, is sharded along its own `dim` there: each rank keeps its shard of what all of them have, and
/// it is gathered again when backward needs it. Less memory for more communication, around a tensor parallel
/// module, whose input is the same on all ranks:
///
///   { InputReshard saving(mesh, 0); y = mlp->forward(x); }
///
/// Tensors of one dim (biases and the like) are left alone.
class TESSERA_API InputReshard {
 public:
  /// `mesh_dim` may be left out on a mesh of one dim.
  InputReshard(const DeviceMesh& mesh, int64_t dim, const std::optional<MeshDim>& mesh_dim = std::nullopt);
  ~InputReshard();
  InputReshard(const InputReshard&) = delete;
  InputReshard& operator=(const InputReshard&) = delete;

  const DeviceMesh& mesh() const { return mesh_; }
  int64_t mesh_dim() const { return mesh_dim_; }
  int64_t dim() const { return dim_; }

 private:
  const DeviceMesh mesh_;
  const int64_t mesh_dim_, dim_;
  ThreadScope<const InputReshard*, InputReshard> scope_;
};

}  // namespace tessera
