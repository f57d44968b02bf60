// Sharded tensors as distributed ones, and back.

#include <tessera/comm/collectives.h>
#include <tessera/sharded/bridge.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/shard_tensor.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/sharded/specs.h"
#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera::sharded {
namespace {

using testing::all_placements;
using testing::chunks;
using testing::expect_error;
using testing::expect_parts;
using testing::global_tensor;
using testing::grid_spec;
using testing::on_ranks;
using testing::part;

TEST(Bridge, ChunksAreShardsWithoutCopying) {
  on_ranks(4, [](int64_t) {
    for (const std::vector<int64_t>& size : {std::vector<int64_t>{8, 4}, {10, 3}, {2, 5}}) {
      for (const int64_t dim : {0, 1, -1}) {
        for (const auto& order : {std::vector<int64_t>{0, 1, 2, 3}, {2, 0, 3, 1}}) {
          const at::Tensor global = global_tensor(size);
          const ShardedTensor tensor = shard_tensor(global, chunks(dim, order));
          const DTensor distributed = to_dtensor(tensor);
          EXPECT_EQ(distributed.placements(), Placements{tessera::Shard(dim < 0 ? 1 : dim)});
          EXPECT_EQ(distributed.device_mesh().ranks(), order);
          EXPECT_EQ(distributed.to_local().const_data_ptr(), tensor.local_tensor().const_data_ptr());
          EXPECT_TRUE(at::equal(distributed.full_tensor(), global));
          const ShardedTensor back = from_dtensor(distributed);
          EXPECT_EQ(back.local_tensor().const_data_ptr(), tensor.local_tensor().const_data_ptr());
          EXPECT_EQ(back.metadata(), tensor.metadata());
        }
      }
    }
  });
}

TEST(Bridge, GridsAreTwoShardsWithoutCopying) {
  on_ranks(4, [](int64_t) {
    const at::Tensor global = global_tensor({6, 4});
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    const EnumerableShardingSpec grid({{{0, 0}, {3, 2}, "rank:0/cpu"},
                                       {{0, 2}, {3, 2}, "rank:1/cpu"},
                                       {{3, 0}, {3, 2}, "rank:2/cpu"},
                                       {{3, 2}, {3, 2}, "rank:3/cpu"}});
    const ShardedTensor tensor = shard_tensor(global, grid);
    const DTensor distributed = to_dtensor(tensor, mesh, {tessera::Shard(0), tessera::Shard(1)});
    EXPECT_EQ(distributed.to_local().const_data_ptr(), tensor.local_tensor().const_data_ptr());
    EXPECT_TRUE(at::equal(distributed.full_tensor(), global));
  });
}

TEST(Bridge, OtherTilingsAreReshardedFirst) {
  on_ranks(4, [](int64_t) {
    const at::Tensor global = global_tensor({7, 5});
    const ShardedTensor tensor = shard_tensor(global, grid_spec({7, 5}, 3));
    EXPECT_TRUE(at::equal(to_dtensor(tensor).full_tensor(), global));
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    const DTensor distributed = to_dtensor(tensor, mesh, {tessera::Shard(1), tessera::Shard(1)});
    EXPECT_TRUE(at::equal(distributed.full_tensor(), global));
  });
}

TEST(Bridge, EveryPlacementThatIsNotPartial) {
  on_ranks(4, [](int64_t) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2});
    for (const std::vector<int64_t>& size : {std::vector<int64_t>{4, 6}, {5, 3}, {1, 2}, {0, 3}}) {
      const at::Tensor global = global_tensor(size);
      for (const Placements& placements : all_placements(2, 2, /*partial=*/false)) {
        const ShardedTensor tensor = from_dtensor(distribute_tensor(global, mesh, placements));
        expect_parts(tensor, global);
        const at::Tensor gathered = tensor.gather(0);
        if (gathered.defined()) EXPECT_TRUE(at::equal(gathered, global));
      }
      const ShardedTensor strided =
          from_dtensor(distribute_tensor(global, mesh, {StridedShard(0, 2), tessera::Shard(0)}));
      expect_parts(strided, global);
    }
  });
}

TEST(Bridge, GradientsFlow) {
  on_ranks(4, [](int64_t) {
    const at::Tensor global = global_tensor({6, 5});
    const ShardedTensor tensor = shard_tensor(global.clone().requires_grad_(), chunks(0, {0, 1, 2, 3}));
    (to_dtensor(tensor) * 3).sum().backward();
    EXPECT_TRUE((tensor.local_tensor().grad() == 3).all().item<bool>());
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {4});
    const at::Tensor leaf = distribute_tensor(global, mesh, {tessera::Shard(0)}).requires_grad_();
    const ShardedTensor sharded = from_dtensor(leaf);
    EXPECT_TRUE(sharded.requires_grad());
    (sharded.local_tensor() * 2).sum().backward();
    EXPECT_TRUE((DTensor(leaf.grad()).full_tensor() == 2).all().item<bool>());
  });
}

// Also where a rank holds nothing on one side, or a replica that is no shard.
TEST(Bridge, GradientsFlowOnEveryRank) {
  on_ranks(4, [](int64_t) {
    const at::Tensor global = global_tensor({6, 3});
    const DeviceMesh line = init_device_mesh(at::kCPU, {4}), square = init_device_mesh(at::kCPU, {2, 2});
    for (const auto& spec : {chunks(0, {0, 1}), chunks(1, {3}), chunks(0, {0, 1, 2, 3})}) {
      for (const int64_t dim : {0, 1}) {  // along dim 1 the last rank holds nothing
        const ShardedTensor tensor = shard_tensor(global.clone().requires_grad_(), spec);
        const at::Tensor distributed = to_dtensor(tensor, line, {Shard(static_cast<int32_t>(dim))});
        (distributed * distributed).sum().backward();
        ASSERT_TRUE(tensor.grad().defined());
        expect_parts(tensor.grad(), global * 2);
      }
    }
    for (const Placements& placements :
         {Placements{Shard(0), Replicate()}, {Replicate(), Shard(1)}, {Replicate(), Replicate()}}) {
      const at::Tensor leaf = distribute_tensor(global, square, placements).requires_grad_();
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& local : from_dtensor(leaf).local_tensors()) loss = loss + local.square().sum();
      loss.backward();
      EXPECT_TRUE(at::equal(DTensor(leaf.grad()).full_tensor(), global * 2));
    }
  });
}

TEST(Bridge, Errors) {
  on_ranks(2, [](int64_t) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const ShardedTensor tensor = zeros(chunks(0, {0, 1}), {4, 2});
    expect_error<c10::ValueError>([&] { to_dtensor(tensor, mesh, {Replicate()}); },
                                  {"replicated", "redistribute"});
    expect_error<c10::ValueError>([&] { to_dtensor(tensor, mesh, {Partial()}); }, {"partial"});
    const DTensor partial = DTensor::from_local(at::ones({2}), mesh, {Partial()});
    expect_error<c10::ValueError>([&] { from_dtensor(partial); }, {"reduced"});
    const ShardedTensor alone = zeros(chunks(0, {0}), {4}, {.process_group = {0}});
    expect_error<c10::ValueError>([&] { to_dtensor(alone, mesh, {tessera::Shard(0)}); },
                                  {"ranks [0]", "[0, 1]"});
  });
}

TEST(Bridge, WhatOneRankAsksForReachesAll) {
  on_ranks(2, [](int64_t rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const ShardedTensor tensor = shard_tensor(global_tensor({4, 2}), chunks(0, {0, 1}));
    // Beside a rank that would move data, and beside one that would not.
    for (const int32_t dim : {1, 0}) {
      auto placed = [&](const Placement& other) {
        return Placements{rank == 1 ? other : Placement(tessera::Shard(dim))};
      };
      expect_error<c10::ValueError>([&] { to_dtensor(tensor, mesh, placed(Replicate())); }, {"replicated"});
      expect_error<c10::ValueError>([&] { to_dtensor(tensor, mesh, placed(tessera::Shard(1 - dim))); },
                                    {"to_dtensor", "rank 0", "rank 1"});
    }
    EXPECT_TRUE(at::equal(to_dtensor(tensor).full_tensor(), global_tensor({4, 2})));
  });
}

}  // namespace
}  // namespace tessera::sharded
