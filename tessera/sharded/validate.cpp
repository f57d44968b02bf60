#include <tessera/error.h>
#include <tessera/sharded/validate.h>

#include <algorithm>
#include <optional>

#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

/// Shards that overlap may hold more elements together than 64 bits can count.
using Volume = long double;

Volume volume_of(c10::IntArrayRef sizes) {
  Volume volume = 1;
  for (const int64_t size : sizes) volume *= static_cast<Volume>(size);
  return volume;
}

}  // namespace

std::vector<Box> boxes_of(const std::vector<ShardMetadata>& shards) {
  std::vector<Box> boxes;
  boxes.reserve(shards.size());
  for (const ShardMetadata& shard : shards) boxes.push_back(box_of(shard));
  return boxes;
}

void validate_non_overlapping_shards_metadata(const std::vector<ShardMetadata>& shards) {
  for (const ShardMetadata& shard : shards) {
    TESSERA_CHECK_VALUE(shard.dim() == shards[0].dim(),
                        "Shards of one tensor have the same number of dims, but ", shards[0], " has ",
                        shards[0].dim(), " and ", shard, " has ", shard.dim(), ".");
  }
  const std::vector<Box> boxes = boxes_of(shards);
  std::optional<std::pair<size_t, size_t>> found;
  for_each_overlap(boxes, boxes, [&](size_t i, size_t j) {
    if (i != j) found = std::minmax(i, j);
    return i != j;
  });
  if (!found) return;
  const auto [first, second] = *found;
  const auto shared = intersect(boxes[first], boxes[second]);
  TESSERA_CHECK_VALUE(false, "Shards ", first, " (", shards[first], ") and ", second, " (", shards[second],
                      ") overlap: both have element ", c10::IntArrayRef(shared->offsets), ".");
}

void check_tensor(const std::vector<ShardMetadata>& shards, c10::IntArrayRef size) {
  TESSERA_CHECK_VALUE(!shards.empty(), "A tensor of size ", size, " has no shards.");
  static_cast<void>(ShardMetadata(std::vector<int64_t>(size.size(), 0), size.vec()).numel());  // may throw
  Volume covered = 0;
  for (const size_t i : c10::irange(shards.size())) {
    const ShardMetadata& shard = shards[i];
    TESSERA_CHECK_VALUE(shard.dim() == static_cast<int64_t>(size.size()), "Shard ", i, " (", shard, ") has ",
                        shard.dim(), " dims, but the tensor, of size ", size, ", has ", size.size(), ".");
    const Volume volume = volume_of(shard.shard_sizes);
    covered += volume;
    for (size_t dim = 0; dim < size.size() && volume > 0; ++dim) {
      TESSERA_CHECK_VALUE(shard.shard_offsets[dim] + shard.shard_sizes[dim] <= size[dim], "Shard ", i, " (",
                          shard, ") reaches beyond a tensor of size ", size, ": in dim ", dim, " it ends at ",
                          shard.shard_offsets[dim] + shard.shard_sizes[dim], ".");
    }
  }
  const Volume expected = volume_of(size);
  if (covered == expected) return;
  const auto gap = covered < expected ? find_gap(boxes_of(shards), size) : std::nullopt;
  TESSERA_CHECK_VALUE(!gap, "The shards are not all of a tensor of size ", size, ": they have ", covered,
                      " of its ", expected, " elements, and none has element ", c10::IntArrayRef(*gap), ".");
  TESSERA_CHECK_VALUE(false, "The shards have ", covered, " elements, but a tensor of size ", size, " has ",
                      expected, ": some of them overlap.");
}

}  // namespace tessera::sharded
