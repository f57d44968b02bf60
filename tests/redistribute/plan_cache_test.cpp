#include <tessera/redistribute/plan_cache.h>

#include <thread>

#include <gtest/gtest.h>

#include "tests/placement/fake_mesh.h"

namespace tessera {
namespace {

Spec spec(const DeviceMesh& mesh, const Placement& placement, int64_t size = 8) {
  return Spec(mesh, {placement}, {size, 4});
}

TEST(PlanCache, SecondCallDoesNotSearch) {
  const DeviceMesh mesh = fake_mesh({2});
  const auto before = plan_cache_statistics();
  const auto first = cached_plan(spec(mesh, Shard(0)), spec(mesh, Replicate()));
  const auto second = cached_plan(spec(mesh, Shard(0)), spec(mesh, Replicate()));
  EXPECT_EQ(first, second);
  const auto after = plan_cache_statistics();
  EXPECT_EQ(after.misses, before.misses + 1);
  EXPECT_EQ(after.hits, before.hits + 1);
  EXPECT_EQ(first->str(), plan(spec(mesh, Shard(0)), spec(mesh, Replicate())).str());
}

TEST(PlanCache, DirectionMatters) {
  const DeviceMesh mesh = fake_mesh({2});
  const auto there = cached_plan(spec(mesh, Shard(0)), spec(mesh, Shard(1)));
  const auto back = cached_plan(spec(mesh, Shard(1)), spec(mesh, Shard(0)));
  EXPECT_EQ(there->to, back->from);
  EXPECT_NE(there, back);
}

/// An entry keeps its specs, so that no other spec can get their addresses.
TEST(PlanCache, EntriesKeepTheirSpecs) {
  const DeviceMesh mesh = fake_mesh({2});
  cached_plan(spec(mesh, Shard(0), 24), spec(mesh, Replicate(), 24));
  const size_t interned = Spec::interned_count();
  spec(mesh, Shard(0), 24);
  EXPECT_EQ(Spec::interned_count(), interned);
}

TEST(PlanCache, IsBounded) {
  const DeviceMesh mesh = fake_mesh({2});
  const auto first_from = spec(mesh, Shard(0), 1), first_to = spec(mesh, Replicate(), 1);
  cached_plan(first_from, first_to);
  const size_t interned = Spec::interned_count();
  for (int64_t size = 2; size < 3 * static_cast<int64_t>(kPlanCacheCapacity); ++size) {
    cached_plan(spec(mesh, Shard(0), size), spec(mesh, Replicate(), size));
    EXPECT_LE(plan_cache_statistics().size, kPlanCacheCapacity);
  }
  EXPECT_LE(Spec::interned_count(), interned + 3 * kPlanCacheCapacity);
  const auto before = plan_cache_statistics();
  cached_plan(first_from, first_to);  // was evicted
  EXPECT_EQ(plan_cache_statistics().misses, before.misses + 1);
  EXPECT_EQ(plan_cache_statistics().size, kPlanCacheCapacity);
}

TEST(PlanCache, IsOfOneThread) {
  const DeviceMesh mesh = fake_mesh({2});
  cached_plan(spec(mesh, Shard(0)), spec(mesh, Replicate()));
  std::thread([&] {
    EXPECT_EQ(plan_cache_statistics().size, 0u);
    cached_plan(spec(mesh, Shard(0)), spec(mesh, Replicate()));
    EXPECT_EQ(plan_cache_statistics().misses, 1u);
  }).join();
}

}  // namespace
}  // namespace tessera
