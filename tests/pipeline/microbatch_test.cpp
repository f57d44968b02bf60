// Batches in parts: of plain tensors, and of shards.

#include <tessera/comm/run.h>
#include <tessera/debug/comm_debug_mode.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/pipeline/microbatch.h>

#include <ATen/ATen.h>

#include "tests/support/compare.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::expect_error;
using testing::numbers;

TEST(Microbatch, SplitsAsTensorSplit) {
  for (int64_t rows = 1; rows <= 9; ++rows) {
    for (int64_t count = 1; count <= rows; ++count) {
      const at::Tensor batch = numbers({rows, 3});
      const auto parts = split_microbatches(batch, count), expected = batch.tensor_split(count);
      ASSERT_EQ(parts.size(), expected.size());
      for (size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(at::equal(parts[i], expected[i]));
      EXPECT_EQ(split_rule(batch, count), c10::str(rows, " rows"));
    }
  }
  expect_error<c10::ValueError>(
      [] {
        split_microbatches(at::zeros({3, 2}), 4);
      },
      {"A batch of 3", "into 4 micro-batches", "[3, 2]"});
  expect_error<c10::ValueError>([] { split_microbatches(at::zeros({}), 1); }, {"first dim"});
}

/// Even, uneven and empty shards: the micro-batches have all rows of the batch once, in some order, and nothing is moved
/// but where parts of shards are no shards.
TEST(Microbatch, SplitsShards) {
  run(4, [] {
    const DeviceMesh line = init_device_mesh(at::kCPU, {4}, {"dp"});
    const DeviceMesh plane = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    struct Case {
      DeviceMesh mesh;
      Placements placements;
      std::string sharded;
    };
    const std::vector<Case> cases{{line, {Shard(0)}, ", sharded over dp=4"},
                                  {plane, {Shard(0), Replicate()}, ", sharded over dp=2"},
                                  {plane, {Shard(0), Shard(1)}, ", sharded over dp=2"},
                                  {plane, {Shard(0), Shard(0)}, ", sharded over dp=2, sharded over tp=2"},
                                  {plane, {Shard(1), Shard(0)}, ", sharded over tp=2"},
                                  {plane, {Shard(1), Replicate()}, ""},
                                  {plane, {Partial(), Replicate()}, ""}};
    int64_t by_shards = 0, by_rows = 0;
    for (const auto& [mesh, placements, sharded] : cases) {
      for (int64_t rows = 1; rows <= 17; ++rows) {
        const at::Tensor batch = at::arange(rows * 3).view({rows, 3});
        const at::Tensor distributed = distribute_tensor(batch, mesh, placements, std::nullopt);
        for (int64_t count = 1; count <= std::min<int64_t>(rows, 5); ++count) {
          CommDebugMode counts;
          const auto parts = split_microbatches(distributed, count);
          const std::string rule = split_rule(distributed, count);
          if (rule != c10::str(rows, " rows")) {
            EXPECT_EQ(rule, c10::str(rows, " rows", sharded));
            EXPECT_EQ(counts.get_total_counts(), 0) << rule;
            ++by_shards;
          } else {
            by_rows += !sharded.empty();
          }
          std::vector<at::Tensor> all;
          for (const at::Tensor& part : parts) {
            EXPECT_GT(part.size(0), 0);
            all.push_back(DTensor(part).full_tensor());
          }
          EXPECT_TRUE(at::equal(std::get<0>(at::cat(all).select(1, 0).sort()), batch.select(1, 0)))
              << rows << " rows in " << count << ", " << rule;
        }
      }
    }
    EXPECT_GT(by_shards, 100);
    EXPECT_GT(by_rows, 10);
  });
}

}  // namespace
}  // namespace tessera
