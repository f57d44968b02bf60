// Sharded tensors: what it costs to check very many shards, to reshard a tensor, and to look up rows.

#include <tessera/comm/run.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/shard_tensor.h>
#include <tessera/sharded/validate.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include <ATen/ATen.h>

namespace {

using namespace tessera;
using namespace tessera::sharded;
using Shards = std::vector<ShardMetadata>;

/// The least of some runs, in seconds.
double seconds(int runs, const std::function<void()>& function) {
  double best = 1e9;
  for (int i = 0; i < runs; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    function();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

Shards grid(int64_t dims, int64_t side) {
  Shards result;
  std::vector<int64_t> at(dims, 0);
  for (int64_t dim = 0; dim >= 0;) {
    result.emplace_back(at, std::vector<int64_t>(dims, 1));
    for (dim = dims - 1; dim >= 0 && ++at[dim] == side; --dim) at[dim] = 0;
  }
  return result;
}

/// Long and thin in three directions, woven so that none touches another.
Shards beams(int64_t side) {
  Shards result;
  for (int64_t i = 0; i < side; ++i) {
    for (int64_t j = 0; j < side; ++j) {
      result.push_back({{0, 2 * i, 2 * j}, {2 * side, 1, 1}});
      result.push_back({{2 * i, 0, 2 * j + 1}, {1, 2 * side, 1}});
      result.push_back({{2 * i + 1, 2 * j + 1, 0}, {1, 1, 2 * side}});
    }
  }
  return result;
}

void check_many() {
  std::printf("checking that shards do not overlap, and sorting as many by their offsets\n");
  auto measure = [](const char* name, Shards shards) {
    std::shuffle(shards.begin(), shards.end(), std::mt19937(1));
    const double checked = seconds(3, [&] { validate_non_overlapping_shards_metadata(shards); });
    std::vector<const ShardMetadata*> order;
    for (const ShardMetadata& shard : shards) order.push_back(&shard);
    const double sorted = seconds(1, [&] {
      std::sort(order.begin(), order.end(), [](const ShardMetadata* a, const ShardMetadata* b) {
        return a->shard_offsets < b->shard_offsets;
      });
    });
    std::printf("  %-22s %7zu shards  %8.1f ms  %5.1f sorts\n", name, shards.size(), checked * 1e3,
                checked / sorted);
  };
  measure("a line", grid(1, 100'000));
  measure("a grid of 2 dims", grid(2, 316));
  measure("a grid of 3 dims", grid(3, 46));
  measure("a grid of 4 dims", grid(4, 18));
  measure("woven beams", beams(182));
  measure("woven beams, 10 times", beams(577));
}

ChunkShardingSpec chunks(int64_t dim, int64_t ranks) {
  std::vector<RemoteDevice> placements;
  for (int64_t rank = 0; rank < ranks; ++rank) placements.emplace_back(rank, at::kCPU);
  return {dim, placements};
}

void reshard_and_look_up(int64_t ranks) {
  std::printf("%ld ranks as threads\n", static_cast<long>(ranks));
  run(ranks, [&] {
    const bool speaks = get_rank() == 0;
    const std::vector<int64_t> size{4096, 2048};
    const ShardedTensor rows = ones(chunks(0, ranks), size);
    const auto columns = chunks(1, ranks);
    rows.reshard(columns);
    const double reshard = seconds(10, [&] { rows.reshard(columns); });
    const at::Tensor& local = rows.local_tensor();
    at::Tensor copy = at::empty_like(local);
    const double copied =
        seconds(10, [&] { std::memcpy(copy.mutable_data_ptr(), local.const_data_ptr(), local.nbytes()); });
    if (speaks)
      std::printf("  reshard rows to columns, %.0f MiB a rank  %8.2f ms  %5.1f memcpy\n",
                  static_cast<double>(local.nbytes()) / (1 << 20), reshard * 1e3, reshard / copied);

    const at::Tensor table = at::ones({100'000, 64});
    const at::Tensor indices = at::remainder(at::arange(4096) * (7919 + get_rank()), 100'000);
    const at::Tensor global = table.clone();
    const double plain = seconds(10, [&] { at::embedding(global, indices); });
    for (const int64_t dim : {0, 1}) {
      const at::Tensor sharded = shard_tensor(table, chunks(dim, ranks));
      at::embedding(sharded, indices);
      const double looked = seconds(10, [&] { at::embedding(sharded, indices); });
      if (speaks)
        std::printf("  embedding of 4096 rows of 64, sharded by %s  %8.2f ms  %5.1f of one device\n",
                    dim == 0 ? "rows   " : "columns", looked * 1e3, looked / plain);
    }
  });
}

}  // namespace

int main() {
  check_many();
  reshard_and_look_up(2);
}
