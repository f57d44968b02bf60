#include <tessera/checkpoint/local_boxes.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/sharded/sharded_tensor.h>

#include <c10/util/irange.h>
#include <torch/csrc/autograd/grad_mode.h>

namespace tessera::checkpoint {

namespace {

/// Adds one box for each combination of pieces, which lie one after the other along each dim of `local`.
void add_boxes(const std::vector<Pieces>& pieces, size_t dim, const at::Tensor& local,
               std::vector<int64_t>& offsets, std::vector<LocalBoxView>& boxes) {
  if (dim == pieces.size()) {
    boxes.push_back({offsets, local});
    return;
  }
  int64_t position = 0;
  for (const Range& range : pieces[dim]) {
    offsets.push_back(range.offset);
    add_boxes(pieces, dim + 1, local.narrow(static_cast<int64_t>(dim), position, range.size), offsets, boxes);
    offsets.pop_back();
    position += range.size;
  }
}

void check_kind(const std::string& key, const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.layout() == c10::kStrided, "'", key, "' is a tensor of layout ", tensor.layout(),
                ". Checkpoints hold strided tensors: call to_dense() first.");
  TESSERA_CHECK(!tensor.is_quantized(), "'", key,
                "' is a quantized tensor. Checkpoints hold plain dtypes: save ",
                "int_repr(), scale and zero point.");
  TESSERA_CHECK(!tensor.is_meta(), "'", key,
                "' is on the meta device: it has no elements to save or load into. Call ",
                "to_empty() first.");
}

}  // namespace

LocalTensor local_boxes(const std::string& key, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  LocalTensor result;
  result.shape = tensor.sizes().vec();
  result.dtype = tensor.scalar_type();
  if (DTensor::is_dtensor(tensor)) {
    const DTensor distributed(tensor);
    const Spec& spec = distributed.spec();
    TESSERA_CHECK(!spec.has_partial(), "'", key, "' has partial values: ", spec, ". Redistribute it first.");
    const at::Tensor local = distributed.to_local().detach();
    check_kind(key, local);
    std::vector<int64_t> offsets;
    if (spec.mesh().get_coordinate()) add_boxes(spec.local_pieces(), 0, local, offsets, result.boxes);
  } else if (sharded::ShardedTensor::is_sharded_tensor(tensor)) {
    for (const sharded::LocalShard& shard : sharded::ShardedTensor(tensor).local_shards()) {
      check_kind(key, shard.tensor);
      result.boxes.push_back({shard.metadata.shard_offsets, shard.tensor.detach()});
    }
  } else {
    check_kind(key, tensor);
    result.boxes.push_back({std::vector<int64_t>(result.shape.size(), 0), tensor.detach()});
  }
  std::erase_if(result.boxes, [](const LocalBoxView& box) { return box.elements.numel() == 0; });
  return result;
}

}  // namespace tessera::checkpoint
