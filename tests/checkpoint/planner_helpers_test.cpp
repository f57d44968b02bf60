// The protocol of torch.distributed.checkpoint: storing tensors by hand with it, from any layout to any other.

#include <tessera/checkpoint/planner_helpers.h>
#include <tessera/comm/run.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/sharded/shard_tensor.h>

#include <map>
#include <mutex>

#include <ATen/ATen.h>

#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

at::Tensor narrowed(at::Tensor tensor, const std::vector<int64_t>& offsets,
                    const std::vector<int64_t>& sizes) {
  for (size_t d = 0; d < offsets.size(); ++d)
    tensor = tensor.narrow(static_cast<int64_t>(d), offsets[d], sizes[d]);
  return tensor;
}

TEST(PlannerHelpers, StoreAndFill) {
  const at::Tensor full = at::arange(70).reshape({10, 7}).to(at::kFloat);
  std::vector<Placements> all = tessera::testing::all_placements(2, 2, false);
  all.push_back({StridedShard(0, 2), Shard(0)});
  for (const Placements& from : all) {
    for (const Placements& to : all) {
      std::mutex mutex;
      std::map<std::vector<int64_t>, at::Tensor> store;
      std::vector<ChunkStorageMetadata> stored;
      run(4, [&] {
        const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
        const at::Tensor tensor = distribute_tensor(full, mesh, replicated(mesh));
        const at::Tensor source = DTensor(tensor).redistribute(from);
        for (const WriteItem& item : create_write_items("w", source)) {
          EXPECT_EQ(item.size, (std::vector<int64_t>{10, 7}));
          EXPECT_TRUE(item.is_shard);
          const at::Tensor shard = get_tensor_shard(source, item.index);
          EXPECT_EQ(shard.sizes(), c10::IntArrayRef(item.chunk.sizes));
          const std::lock_guard lock(mutex);
          if (store.emplace(item.chunk.offsets, shard.clone()).second) stored.push_back(item.chunk);
        }
      });
      run(4, [&] {
        const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
        const DTensor target =
            DTensor(distribute_tensor(at::zeros_like(full), mesh, replicated(mesh))).redistribute(to);
        for (const ReadItem& item : create_read_items("w", stored, create_chunk_list(target))) {
          at::Tensor shard = get_tensor_shard(target, item.dest_index);
          narrowed(shard, item.dest_offsets, item.lengths)
              .copy_(narrowed(store.at(item.storage_index.offset), item.storage_offsets, item.lengths));
        }
        EXPECT_TRUE(at::equal(target.full_tensor(), full));
      });
    }
  }
}

TEST(PlannerHelpers, OfOtherTensors) {
  run(2, [&] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const auto plain = create_write_items("p", at::zeros({2, 3}));
    ASSERT_EQ(plain.size(), 1u);
    EXPECT_FALSE(plain[0].is_shard);
    EXPECT_EQ(plain[0].chunk, (ChunkStorageMetadata{{0, 0}, {2, 3}}));
    const ShardedTensor sharded =
        sharded::shard_tensor(at::arange(6), sharded::ChunkShardingSpec(0, {"rank:1/cpu", "rank:0/cpu"}));
    const auto chunks = create_chunk_list(sharded);
    ASSERT_EQ(chunks.size(), 1u);
    EXPECT_EQ(chunks[0].offsets[0], get_rank() == 0 ? 3 : 0);
    EXPECT_TRUE(get_tensor_shard(sharded, {"s", chunks[0].offsets}).is_alias_of(sharded.local_tensor()));
    EXPECT_THAT(error_of([&] {
                  get_tensor_shard(sharded, {"s", {1}});
                }),
                HasSubstr("This rank has no chunk of 's' at [1]; it has chunks at"));
    const at::Tensor partial = DTensor::from_local(at::ones({2}), mesh, {Partial()});
    EXPECT_THAT(error_of([&] { create_chunk_list(partial); }), HasSubstr("partial values"));
  });
}

}  // namespace
}  // namespace tessera::checkpoint
