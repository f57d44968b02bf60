#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/spec.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// The mesh dims that fully_shard works on: `shard` shards parameters, along `replicate` ranks have the same
/// shards. Parameters are left as they are along the other dims of the mesh.
struct ShardDims {
  DeviceMesh mesh;
  std::vector<int64_t> replicate = {};
  int64_t shard = 0;

  /// Of a mesh: all its dims, or those named; the last one shards.
  TESSERA_API static ShardDims of(const DeviceMesh& mesh, const std::vector<MeshDim>& dims = {});

  /// The same dims on a mesh that has them too, as a position there; throws if it does not have them.
  ShardDims on(const DeviceMesh& other) const;
  bool is_on(const DeviceMesh& other) const;
  bool has(int64_t mesh_dim) const;
  /// How many ranks share a parameter, and how many ranks train together.
  int64_t shards() const { return mesh.size(MeshDim(shard)); }
  int64_t ranks() const;
};

/// How a parameter, plain or distributed on other mesh dims, is to be placed: in addition sharded along its
/// `dim`, or nowhere if it has no dims. What shards it already shards it first, so that gathering it gives that
/// back.
TESSERA_API Spec shard_target(const at::Tensor& parameter, const ShardDims& dims, int64_t dim);

/// A distributed parameter placed so. A plain one is not taken: see distribute_tensor.
TESSERA_API at::Tensor sharded_as(const at::Tensor& parameter, const Spec& target);

}  // namespace tessera
