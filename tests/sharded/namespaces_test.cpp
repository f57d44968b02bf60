// Programs may use these namespaces at once.

#include <tessera/tessera.h>

#include <sstream>
#include <type_traits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

using namespace tessera;
using namespace tessera::checkpoint;
using namespace tessera::sharded;

namespace {

TEST(Namespaces, GoTogether) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const ChunkShardingSpec spec(0, {"rank:0/cpu", "rank:1/cpu"});
    const Placements rows{Shard(0)};
    const ShardedTensor sharded = ones(spec, {4, 2});
    const DTensor distributed = ones({4, 2}, mesh, rows);
    EXPECT_TRUE(at::equal(to_dtensor(sharded, mesh, rows), distributed));
    EXPECT_TRUE(at::equal(from_dtensor(distributed), sharded));
    for (const LocalShard& shard : sharded.local_shards())
      EXPECT_TRUE(at::equal(shard.tensor, distributed.to_local()));
    EXPECT_TRUE(at::equal(from_dtensor(zeros({4}, mesh, rows)), zeros(spec, {4})));
    EXPECT_TRUE(at::equal(from_dtensor(full({4}, 3, mesh, rows)), full(spec, {4}, 3.f)));
    EXPECT_EQ(empty({4}, mesh, {Replicate()}).sizes(), empty(spec, {4}, Options()).sizes());
    EXPECT_EQ(rand({4}, mesh, rows).sizes(), rand(spec, {4}).sizes());
    EXPECT_EQ(randn({4}, mesh, rows).sizes(), randn(spec, {4}).sizes());
    std::ostringstream out;
    out << static_cast<const at::Tensor&>(sharded);
    EXPECT_EQ(out.str(), "ShardedTensor [4, 2] f32: [0, 0]+[2, 2] rank:0/cpu, [2, 0]+[2, 2] rank:1/cpu");
    EXPECT_TRUE(sharded::init::constant_(zeros(spec, {4, 2}), 1).is_floating_point());
    TensorDict tensors{{"weight", sharded}};
    EXPECT_EQ(from_bytes(to_bytes(tensors)).size(), 1u);
    static_assert(!std::is_same_v<StateDict, TensorDict>);
  });
}

}  // namespace
