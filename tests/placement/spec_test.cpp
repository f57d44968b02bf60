#include <tessera/placement/spec.h>

#include <thread>
#include <unordered_set>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/placement/fake_mesh.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_error;

using c10::DimVector;
using c10::IntArrayRef;

TEST(Spec, KnowsItsTensor) {
  const DeviceMesh mesh = fake_mesh({2, 3}, {"dp", "tp"}, /*rank=*/4);
  const Spec spec(mesh, {Shard(0), Shard(-1)}, {5, 7}, std::nullopt, at::kBFloat16);
  EXPECT_TRUE(spec);
  EXPECT_EQ(spec.mesh(), mesh);
  EXPECT_EQ(spec.placements(), (Placements{Shard(0), Shard(1)}));
  EXPECT_EQ(spec.placement(1), Shard(1));
  EXPECT_EQ(spec.order(), ShardOrder{});
  EXPECT_EQ(spec.shape(), (DimVector{5, 7}));
  EXPECT_EQ(spec.strides(), (DimVector{7, 1}));
  EXPECT_EQ(spec.dtype(), at::kBFloat16);
  EXPECT_EQ(spec.ndim(), 2);
  EXPECT_EQ(spec.numel(), 35);

  // Rank 4 is at (1, 1).
  EXPECT_EQ(spec.local_shape(), (DimVector{2, 3}));
  EXPECT_EQ(spec.global_offset(), (DimVector{3, 3}));
  EXPECT_EQ(spec.local_strides(), (DimVector{3, 1}));
  EXPECT_EQ(spec.local_pieces(), (std::vector<Pieces>{{{3, 2}}, {{3, 3}}}));

  EXPECT_EQ(spec.local_shape({0, 2}), (DimVector{3, 1}));
  EXPECT_EQ(spec.global_offset({0, 2}), (DimVector{0, 6}));
  EXPECT_EQ(spec.local_pieces({0, 2}), (std::vector<Pieces>{{{0, 3}}, {{6, 1}}}));
  EXPECT_THROW(spec.local_shape({0, 3}), c10::IndexError);
}

TEST(Spec, LocalStridesKeepTheOrderOfMemory) {
  const Spec spec(fake_mesh({2}), {Shard(1)}, {4, 6}, IntArrayRef{1, 4});
  EXPECT_EQ(spec.strides(), (DimVector{1, 4}));
  EXPECT_EQ(spec.local_strides(), (DimVector{1, 4}));
  EXPECT_EQ(Spec(fake_mesh({2}), {Shard(0)}, {4, 6}, IntArrayRef{1, 4}).local_strides(), (DimVector{1, 2}));
}

TEST(Spec, OutsideTheMeshHoldsNothing) {
  const Spec spec(fake_mesh({2}, {}, /*rank=*/0, /*first_rank=*/1), {Shard(0)}, {5, 7});
  EXPECT_EQ(spec.local_shape(), (DimVector{0}));
  EXPECT_EQ(spec.global_offset(), DimVector{});
  EXPECT_EQ(spec.local_strides(), (DimVector{1}));
  EXPECT_TRUE(spec.local_pieces().empty());
  EXPECT_EQ(spec.local_shape({1}), (DimVector{2, 7}));
}

TEST(Spec, ScalarsAndEmptyTensors) {
  const Spec scalar(fake_mesh({2}), {Partial()}, {});
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_EQ(scalar.local_shape(), DimVector{});
  const Spec empty(fake_mesh({2}), {Shard(0)}, {0, 3});
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_EQ(empty.local_shape(), (DimVector{0, 3}));
}

TEST(Spec, WhatItIs) {
  const DeviceMesh mesh = fake_mesh({2, 1});
  const auto flags = [&](const Placements& placements) {
    const Spec spec(mesh, placements, {4, 4});
    return std::vector<bool>{spec.is_replicated(), spec.is_sharded(), spec.has_partial()};
  };
  EXPECT_EQ(flags({Replicate(), Replicate()}), (std::vector<bool>{true, false, false}));
  EXPECT_EQ(flags({Replicate(), Shard(0)}), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(flags({StridedShard(0, 2), Replicate()}), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(flags({Replicate(), Partial()}), (std::vector<bool>{false, false, true}));
  EXPECT_EQ(flags({Shard(0), NormPartial(2)}), (std::vector<bool>{false, true, true}));
}

TEST(Spec, UndefinedUntilAssigned) {
  Spec spec;
  EXPECT_FALSE(spec);
  EXPECT_EQ(spec, Spec());
  EXPECT_EQ(spec.str(), "undefined");
  expect_error<c10::Error>([&] { (void)spec.shape(); }, {"undefined"});
  spec = Spec(fake_mesh({2}), {Shard(0)}, {4});
  EXPECT_TRUE(spec);
  EXPECT_NE(spec, Spec());
}

TEST(Spec, EqualOnesAreOneObject) {
  const size_t before = Spec::interned_count();
  const DeviceMesh mesh = fake_mesh({2, 2, 2}, {"dp", "cp", "tp"});
  const Spec spec(mesh, {Shard(0), Shard(1), Shard(0)}, {8, 8}, IntArrayRef{8, 1}, at::kFloat, {1, 2, 0});
  const std::vector<Spec> same = {
      spec,
      Spec(mesh, {Shard(0), Shard(1), Shard(0)}, {8, 8}, std::nullopt, at::kFloat, {2, 1, 0}),
      Spec(mesh, {Shard(-2), Shard(-1), StridedShard(0, 1)}, {8, 8}, std::nullopt, at::kFloat, {2, 0, 1}),
  };
  for (const Spec& other : same) {
    EXPECT_EQ(other, spec);
    EXPECT_EQ(other.hash(), spec.hash());
    EXPECT_EQ(&other.placements(), &spec.placements());
  }
  EXPECT_EQ(spec.order(), (ShardOrder{2, 1, 0}));
  EXPECT_EQ(Spec::interned_count(), before + 1);
}

TEST(Spec, EveryPartTellsSpecsApart) {
  const DeviceMesh mesh = fake_mesh({2, 2}, {"dp", "tp"});
  const std::vector<Spec> all = {
      Spec(mesh, {Shard(0), Shard(0)}, {8, 8}),
      Spec(fake_mesh({2, 2}, {"dp", "tp"}), {Shard(0), Shard(0)}, {8, 8}),  // another world
      Spec(mesh, {Shard(0), Shard(1)}, {8, 8}),
      Spec(mesh, {StridedShard(0, 2), Shard(0)}, {8, 8}),
      Spec(mesh, {Shard(0), Shard(0)}, {8, 4}),
      Spec(mesh, {Shard(0), Shard(0)}, {8, 8}, IntArrayRef{1, 8}),
      Spec(mesh, {Shard(0), Shard(0)}, {8, 8}, std::nullopt, at::kDouble),
      Spec(mesh, {Shard(0), Shard(0)}, {8, 8}, std::nullopt, at::kFloat, {1, 0}),
      Spec(mesh, {Partial(), Replicate()}, {8, 8}),
      Spec(mesh, {Partial(ReduceOp::max), Replicate()}, {8, 8}),
      Spec(mesh, {NormPartial(2), Replicate()}, {8, 8}),
      Spec(mesh, {NormPartial(3), Replicate()}, {8, 8}),
  };
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < all.size(); ++j) EXPECT_EQ(all[i] == all[j], i == j) << all[i] << all[j];
  }
  EXPECT_EQ(std::unordered_set<Spec>(all.begin(), all.end()).size(), all.size());
}

TEST(Spec, WithPlacements) {
  const DeviceMesh mesh = fake_mesh({2, 2});
  const Spec spec(mesh, {Shard(0), Shard(0)}, {8, 8}, IntArrayRef{1, 8}, at::kHalf, {1, 0});
  EXPECT_EQ(spec.with_placements({Replicate(), Partial()}),
            Spec(mesh, {Replicate(), Partial()}, {8, 8}, IntArrayRef{1, 8}, at::kHalf));
  EXPECT_EQ(spec.with_placements(spec.placements(), spec.order()), spec);
  EXPECT_NE(spec.with_placements(spec.placements()), spec);
}

TEST(Spec, RefusesWhatMakesNoSense) {
  const DeviceMesh mesh = fake_mesh({2, 2}, {"dp", "tp"});
  expect_error<c10::ValueError>([&] { Spec(mesh, {Shard(0)}, {8}); },
                                {"got 1 placements", "[S(0)]", "mesh(dp=2, tp=2)", "its 2 dims"});
  expect_error<c10::IndexError>(
      [&] {
        Spec(mesh, {Replicate(), Shard(1)}, {8});
      },
      {"S(1)", "mesh dim 1", "1 dim "});
  expect_error<c10::ValueError>(
      [&] {
        Spec(mesh, {Replicate(), Replicate()}, {8, -1});
      },
      {"dim 1", "[8, -1]"});
  expect_error<c10::ValueError>(
      [&] {
        Spec(mesh, {Replicate(), Replicate()}, {8}, IntArrayRef{1, 1});
      },
      {"2 strides", "[8]"});
  EXPECT_THROW(Spec(mesh, {Replicate(), Replicate()}, {8}, IntArrayRef{-1}), c10::ValueError);
  expect_error<c10::ValueError>(
      [&] {
        Spec(mesh, {Shard(0), Shard(0)}, {8}, std::nullopt, at::kFloat, {1, 1});
      },
      {"[1, 1]", "permutation"});
  expect_error<c10::ValueError>(
      [&] {
        Spec(mesh, {Partial(), Partial(ReduceOp::max)}, {8});
      },
      {"P(sum)", "P(max)"});
  const int64_t huge = int64_t{1} << 40;
  EXPECT_THROW(Spec(mesh, {Shard(0), Replicate()}, {huge, huge}), c10::ValueError);
}

TEST(Spec, AMillionMadeAndDroppedLeaveNothing) {
  const DeviceMesh mesh = fake_mesh({2, 2});
  const Spec kept(mesh, {Shard(0), Replicate()}, {1, 1});
  const size_t before = Spec::interned_count();
  for (int64_t i = 0; i < 1000000; ++i) {
    const Spec spec(mesh, {Shard(0), Replicate()}, {i + 2, 1});
    ASSERT_EQ(Spec::interned_count(), before + 1);
  }
  EXPECT_EQ(Spec::interned_count(), before);
}

// Threads make, compare and drop the same few specs, so that lookups meet specs that are just going away.
TEST(Spec, ThreadsShareTheTable) {
  const DeviceMesh mesh = fake_mesh({2, 2});
  const size_t before = Spec::interned_count();
  const auto make = [&](int64_t i) { return Spec(mesh, {Shard(0), Partial()}, {i % 3 + 1, 4}); };
  std::vector<std::thread> threads;
  std::vector<int64_t> wrong(4, 0);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < 50000; ++i) {
        const Spec a = make(i);
        const Spec b = make(i);
        const Spec c = make(i + 1);
        wrong[t] += a != b || a == c || a.shape()[0] != i % 3 + 1;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int64_t>(4, 0));
  EXPECT_EQ(Spec::interned_count(), before);
}

TEST(Spec, ThreadsMakeOneObjectOfEqualSpecs) {
  const DeviceMesh mesh = fake_mesh({2});
  std::vector<Spec> made(8);
  std::vector<std::thread> threads;
  threads.reserve(made.size());
  for (Spec& spec : made) {
    threads.emplace_back([&] { spec = Spec(mesh, {Shard(0)}, {4, 4}); });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(std::unordered_set<Spec>(made.begin(), made.end()).size(), 1);
}

}  // namespace
}  // namespace tessera
