#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace tessera {

/// This rank's shard of a tensor that was replicated when autograd saved it. InputReshard keeps these, and so
/// does `input_reshard` of Python.
class TESSERA_API SavedShard {
 public:
  /// Where and how to shard. `mesh_dim` and `dim` must be dims of the mesh and, counted from either end, of
  /// the tensor.
  struct Layout {
    DeviceMesh mesh;
    int64_t mesh_dim = 0, dim = 0;
  };

  /// Nothing if the tensor is to be saved as it is: if it is not replicated along that mesh dim, has less than
  /// two dims (biases and the like), or lacks `dim`. A plain tensor counts as a replica if `is_replica` says
  /// so: all ranks have the same.
  static std::optional<SavedShard> of(const at::Tensor& tensor, const Layout& layout,
                                      bool is_replica = false);

  /// The tensor again. Called by all ranks.
  at::Tensor gathered() const;

 private:
  SavedShard(at::Tensor shard, int64_t mesh_dim, bool was_plain);

  at::Tensor shard_;
  int64_t mesh_dim_;
  bool was_plain_;
};

}  // namespace tessera
