#include "tests/sharded/specs.h"

#include <gtest/gtest.h>

namespace tessera::testing {

ChunkShardingSpec chunks(int64_t dim, const std::vector<int64_t>& ranks) {
  std::vector<RemoteDevice> placements;
  for (const int64_t rank : ranks) placements.emplace_back(rank, at::kCPU);
  return {dim, std::move(placements)};
}

EnumerableShardingSpec grid_spec(std::vector<int64_t> size, int64_t ranks) {
  const int64_t row = size[0] / 3, column = size[1] / 3;
  auto on = [&](int64_t i) { return RemoteDevice(i % ranks, at::kCPU); };
  return EnumerableShardingSpec({{{0, 0}, {row, column}, on(0)},
                                 {{0, column}, {row, size[1] - column}, on(1)},
                                 {{row, 0}, {size[0] - row, column}, on(2)},
                                 {{row, column}, {size[0] - row, size[1] - column}, on(3)}});
}

EnumerableShardingSpec irregular_spec() {
  return EnumerableShardingSpec({{{0, 0}, {2, 4}, "rank:3/cpu"},
                                 {{0, 4}, {5, 1}, "rank:0/cpu"},
                                 {{5, 1}, {2, 4}, "rank:3/cpu"},
                                 {{2, 0}, {5, 1}, "rank:1/cpu"},
                                 {{2, 1}, {3, 3}, "rank:0/cpu"}});
}

EnumerableShardingSpec random_spec(std::mt19937& random, const std::vector<int64_t>& size, size_t count,
                                   int64_t ranks) {
  auto on = [&] { return RemoteDevice(static_cast<int64_t>(random() % ranks), at::kCPU); };
  std::vector<ShardMetadata> tiles{{std::vector<int64_t>(size.size(), 0), size, on()}};
  while (tiles.size() < count) {
    ShardMetadata& tile = tiles[random() % tiles.size()];
    const size_t dim = random() % size.size();
    if (tile.shard_sizes[dim] < 2) continue;
    ShardMetadata rest = tile;
    const int64_t at = 1 + static_cast<int64_t>(random() % (tile.shard_sizes[dim] - 1));
    tile.shard_sizes[dim] = at;
    rest.shard_offsets[dim] += at;
    rest.shard_sizes[dim] -= at;
    rest.placement = on();
    tiles.push_back(rest);
  }
  std::shuffle(tiles.begin(), tiles.end(), random);
  return EnumerableShardingSpec(std::move(tiles));
}

at::Tensor global_tensor(at::IntArrayRef size) {
  return at::arange(c10::multiply_integers(size), at::kFloat).view(size);
}

at::Tensor part(const at::Tensor& global, const std::vector<int64_t>& offsets,
                const std::vector<int64_t>& sizes) {
  at::Tensor result = global.detach();
  for (size_t dim = 0; dim < offsets.size(); ++dim)
    result = result.narrow(static_cast<int64_t>(dim), offsets[dim], sizes[dim]);
  return result.clone(at::MemoryFormat::Contiguous);
}

void expect_parts(const sharded::ShardedTensor& tensor, const at::Tensor& global) {
  for (const sharded::LocalShard& shard : tensor.local_shards()) {
    const auto& [offsets, sizes] = std::tie(shard.metadata.shard_offsets, shard.metadata.shard_sizes);
    EXPECT_TRUE(at::equal(shard.tensor.detach(), part(global, offsets, sizes))) << shard.metadata;
    EXPECT_TRUE(shard.tensor.is_contiguous()) << shard.metadata;
  }
}

void on_ranks(int64_t count, const std::function<void(int64_t rank)>& body) {
  RunOptions options;
  options.threads_per_rank = 1;
  run(
      count, [&] { body(get_rank()); }, options);
}

}  // namespace tessera::testing
