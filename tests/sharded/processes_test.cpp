// Sharded tensors on ranks that are processes, over gloo and over shared memory: a sample of what the other tests do with threads.

#include <tessera/comm/run.h>
#include <tessera/sharded/bridge.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/shard_tensor.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "tests/sharded/specs.h"
#include "tests/support/compare.h"
#include "tests/support/ranks.h"

namespace tessera::sharded {
namespace {

using testing::chunks;
using testing::expect_close;
using testing::expect_error;
using testing::expect_ok;
using testing::expect_parts;
using testing::global_tensor;
using testing::grid_spec;
using testing::irregular_spec;
using testing::part;
using testing::spawn_ranks;

RANK_BODY(sample) {
  launch(1, [] {
    at::set_num_threads(1);
    const int64_t rank = get_rank();
    // Resharded and gathered, in dtypes that gloo knows and does not know.
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kBool, at::kComplexFloat}) {
      const at::Tensor global = global_tensor({7, 5}).to(dtype);
      const ShardedTensor tensor = shard_tensor(global, chunks(0, {2, 0, 1, 3}), 1);
      expect_parts(tensor, global);
      const ShardedTensor resharded = tensor.reshard(irregular_spec());
      expect_parts(resharded, global);
      expect_parts(resharded.reshard(chunks(1, {0, 1})), global);
      const at::Tensor gathered = resharded.gather(3);
      if (rank == 3) EXPECT_TRUE(at::equal(gathered, global));
      EXPECT_TRUE(at::equal(tensor, shard_tensor(global, chunks(0, {2, 0, 1, 3}))));
    }
    // What does not fit on one rank is an error on every one.
    expect_error<c10::ValueError>(
        [&] {
          init_from_local_shards(
              {LocalShard::from_tensor_and_offsets(at::ones({2, rank == 1 ? 3 : 4}), {2 * rank, 0}, rank)},
              {8, 4});
        },
        {"none has element [2, 3]"});
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const ShardedTensor rows_of_eight = shard_tensor(global_tensor({8, 4}), chunks(0, {0, 1, 2, 3}));
    const Placement other = rank == 2 ? Placement(Replicate()) : Placement(tessera::Shard(1));
    expect_error<c10::ValueError>([&] { to_dtensor(rows_of_eight, mesh, {other}); }, {"replicated"});
    EXPECT_TRUE(at::equal(to_dtensor(rows_of_eight).full_tensor(), global_tensor({8, 4})));
    // Lookups and their gradients.
    const at::Tensor table = global_tensor({9, 4}) / 10;
    const ShardedTensor weight = shard_tensor(table.clone().requires_grad_(), grid_spec({9, 4}, 4));
    const at::Tensor indices = at::remainder(at::arange(5) * (rank + 1), 9);
    const at::Tensor rows = at::embedding(weight, indices);
    expect_close(rows.detach(), at::embedding(table, indices), "rows");
    rows.sum().backward();
    at::Tensor counts = at::zeros({9});
    for (int64_t each = 0; each < 4; ++each)
      counts += at::bincount(at::remainder(at::arange(5) * (each + 1), 9), {}, 9);
    for (const LocalShard& shard : weight.local_shards())
      expect_close(
          shard.tensor.grad(),
          part(counts.unsqueeze(1).expand({9, 4}), shard.metadata.shard_offsets, shard.metadata.shard_sizes),
          "gradient");
    // Gradients go back from where ranks hold nothing, and their norm is that of all.
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& local : weight.reshard(chunks(1, {2, 0})).local_tensors())
      loss = loss + local.sum();
    loss.backward();
    EXPECT_NEAR(weight.grad().norm().item<double>(),
                (counts + 1).unsqueeze(1).expand({9, 4}).norm().item<double>(), 1e-4);
  });
}

TEST(ShardedProcesses, Sample) { testing::expect_ok_over_processes("sample", 4); }

}  // namespace
}  // namespace tessera::sharded
