#pragma once

#include <tessera/checkpoint/catalog.h>
#include <tessera/export.h>

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::checkpoint {

/// A box of a global tensor, and this rank's elements of it: a view that shares memory with the tensor.
struct LocalBoxView {
  std::vector<int64_t> offsets;
  at::Tensor elements;
};

/// What this rank has of a tensor: a plain one it has in full, a DTensor as its spec says (a strided shard in
/// several boxes), a ShardedTensor in its local shards. Boxes without elements are left out. Throws, naming
/// `key`, for what a checkpoint cannot hold: partial values, sparse, quantized or meta tensors.
struct LocalTensor {
  std::vector<int64_t> shape;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<LocalBoxView> boxes;
};
TESSERA_API LocalTensor local_boxes(const std::string& key, const at::Tensor& tensor);

}  // namespace tessera::checkpoint
