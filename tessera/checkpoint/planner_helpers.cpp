#include <tessera/checkpoint/local_boxes.h>
#include <tessera/checkpoint/planner_helpers.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/sharded/boxes.h>
#include <tessera/sharded/sharded_tensor.h>

#include <algorithm>

#include <c10/util/irange.h>

namespace tessera::checkpoint {

namespace {

std::vector<int64_t> minus(c10::IntArrayRef a, c10::IntArrayRef b) {
  std::vector<int64_t> result = a.vec();
  for (const auto i : c10::irange(result.size())) result[i] -= b[i];
  return result;
}

}  // namespace

std::vector<ChunkStorageMetadata> create_chunk_list(const at::Tensor& tensor) {
  std::vector<ChunkStorageMetadata> chunks;
  for (const LocalBoxView& box : local_boxes("tensor", tensor).boxes)
    chunks.push_back({box.offsets, box.elements.sizes().vec()});
  return chunks;
}

std::vector<WriteItem> create_write_items(const std::string& fqn, const at::Tensor& tensor) {
  const LocalTensor local = local_boxes(fqn, tensor);
  const bool is_shard = DTensor::is_dtensor(tensor) || sharded::ShardedTensor::is_sharded_tensor(tensor);
  std::vector<WriteItem> items;
  for (const LocalBoxView& box : local.boxes)
    items.push_back(
        {{fqn, box.offsets}, {box.offsets, box.elements.sizes().vec()}, local.shape, local.dtype, is_shard});
  return items;
}

at::Tensor get_tensor_shard(const at::Tensor& tensor, const MetadataIndex& index) {
  const LocalTensor local = local_boxes(index.fqn, tensor);
  for (const LocalBoxView& box : local.boxes) {
    if (box.offsets == index.offset) return box.elements;
  }
  std::string offsets;
  for (const LocalBoxView& box : local.boxes)
    offsets += c10::str(offsets.empty() ? "" : ", ", c10::IntArrayRef(box.offsets));
  TESSERA_CHECK_INDEX(false, "This rank has no chunk of '", index.fqn, "' at ",
                      c10::IntArrayRef(index.offset),
                      offsets.empty() ? ", nor elsewhere" : c10::str("; it has chunks at ", offsets), ".");
}

std::vector<ReadItem> create_read_items(const std::string& fqn, c10::ArrayRef<ChunkStorageMetadata> stored,
                                        c10::ArrayRef<ChunkStorageMetadata> wanted) {
  const auto boxes_of = [](c10::ArrayRef<ChunkStorageMetadata> chunks) {
    std::vector<sharded::Box> boxes;
    for (const ChunkStorageMetadata& chunk : chunks) boxes.push_back({chunk.offsets, chunk.sizes});
    return boxes;
  };
  const auto from = boxes_of(stored), to = boxes_of(wanted);
  std::vector<std::pair<size_t, size_t>> pairs;  // wanted, stored
  sharded::for_each_overlap(from, to, [&](size_t i, size_t j) {
    pairs.emplace_back(j, i);
    return false;
  });
  std::sort(pairs.begin(), pairs.end());
  std::vector<ReadItem> items;
  for (const auto& [j, i] : pairs) {
    const auto shared = sharded::intersect(from[i], to[j]);
    items.push_back({{fqn, wanted[j].offsets},
                     minus(shared->offsets, wanted[j].offsets),
                     {fqn, stored[i].offsets},
                     minus(shared->offsets, stored[i].offsets),
                     {shared->sizes.begin(), shared->sizes.end()}});
  }
  return items;
}

}  // namespace tessera::checkpoint
