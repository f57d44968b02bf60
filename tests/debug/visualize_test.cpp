// Which rank holds which block, drawn.

#include <tessera/comm/run.h>
#include <tessera/debug/visualize.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/sharded/init.h>

#include <random>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/placement/fake_mesh.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;

TEST(Visualize, TwoDims) {
  EXPECT_EQ(visualize_text("[S(0), S(1)] on mesh(dp=2, tp=2): f32[8, 4]"),
            "f32[8,4] [S(0),S(1)] on mesh(dp=2, tp=2)\n"
            "      0:2   2:4\n"
            "    ┌─────┬─────┐\n"
            "0:4 │  0  │  1  │\n"
            "    ├─────┼─────┤\n"
            "4:8 │  2  │  3  │\n"
            "    └─────┴─────┘\n");
}

TEST(Visualize, OneDimThatIsUneven) {
  EXPECT_EQ(visualize_text("[S(0)] on mesh(4): f32[5]"),
            "f32[5] [S(0)] on mesh(4)\n"
            "  0:2   2:4   4:5\n"
            "┌─────┬─────┬─────┐\n"
            "│  0  │  1  │  2  │\n"
            "└─────┴─────┴─────┘\n"
            "nothing on rank 3\n");
}

TEST(Visualize, ReplicatedPartialAndStrided) {
  EXPECT_THAT(visualize_text("[R, S(0)] on mesh(2, 2): f32[4]"), HasSubstr("│ 0,2 │ 1,3 │"));
  EXPECT_THAT(visualize_text("[R, R] on mesh(4, 4): f32[4]"), HasSubstr("0-15"));
  EXPECT_THAT(visualize_text("[P(sum), R] on mesh(dp=2, tp=2): f32[4]"),
              HasSubstr("P(sum): the 2 ranks along dp hold one partial value each"));
  EXPECT_THAT(visualize_text("[SS(0, 2), S(0)] on mesh(2, 2): f32[8]"),
              HasSubstr("│  0  │  2  │  1  │  3  │"));
  EXPECT_THAT(visualize_text("[S(0)] on mesh(2): f32[0]"), HasSubstr("has no elements"));
  EXPECT_THAT(visualize_text("[R] on mesh(2): f32[]"), HasSubstr("0,1"));
}

TEST(Visualize, SlicesOfMoreDims) {
  const std::string text = visualize_text("[S(0), S(2)] on mesh(2, 2): f32[4, 3, 6]");
  EXPECT_THAT(text, HasSubstr("[0:2, :, :]\n"));
  EXPECT_THAT(text, HasSubstr("[2:4, :, :]\n"));
  EXPECT_THAT(text, HasSubstr("│  2  │  3  │"));
  EXPECT_THAT(visualize_text("[S(0)] on mesh(512): f32[512, 2]"),
              HasSubstr("the first 64 of 512 pieces of dim 0"));
  EXPECT_THAT(visualize_text("[S(0)] on mesh(32): f32[32, 2, 2]"), HasSubstr("the first 24 of 32 slices"));
}

/// Blocks of several rows beside others.
TEST(Visualize, AnyTiling) {
  using sharded::ShardMetadata;
  sharded::ShardedTensorMetadata metadata;
  metadata.size = {4, 6};
  metadata.shards_metadata = {ShardMetadata({0, 0}, {4, 2}, "rank:0/cpu"),
                              ShardMetadata({0, 2}, {1, 4}, "rank:1/cpu"),
                              ShardMetadata({1, 2}, {3, 4}, "rank:2/cpu")};
  EXPECT_EQ(visualize(Tiling::of(metadata)),
            "ShardedTensor f32[4,6], 3 shards\n"
            "      0:2   2:6\n"
            "    ┌─────┬─────┐\n"
            "0:1 │     │  1  │\n"
            "    │  0  ├─────┤\n"
            "1:4 │     │  2  │\n"
            "    └─────┴─────┘\n");
}

TEST(Visualize, Tensors) {
  run(2, [] {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2});
    const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    EXPECT_EQ(visualize(x), visualize_text("[S(0)] on mesh(2): f32[4]"));
    expect_error<c10::ValueError>([] { visualize(at::ones({2})); }, {"plain tensor", "[2]"});
  });
}

TEST(Visualize, Plans) {
  const std::string text = visualize_text("[S(0)] on mesh(2): f32[4]", "[R]");
  EXPECT_THAT(text, HasSubstr("before: f32[4] [S(0)]"));
  EXPECT_THAT(text, HasSubstr("1. all_gather"));
  EXPECT_THAT(text, HasSubstr("after: f32[4] [R]"));
  const std::string svg = visualize_text("[S(0)] on mesh(2): f32[4]", "[R]", PictureFormat::svg);
  EXPECT_THAT(svg, HasSubstr("data-from=\"b0\" data-to=\"a0\""));
  EXPECT_THAT(svg, HasSubstr("data-from=\"b1\" data-to=\"a0\""));
  EXPECT_THAT(visualize_text("[R] on mesh(2): f32[4]", "[S(0)]", PictureFormat::svg),
              HasSubstr("nothing has to come from another rank"));
  expect_error<c10::ValueError>([] { visualize_text("[R] on mesh(2): f32[4]", "[R, R]"); },
                                {"expected one for each"});
}

/// A page says all of every block, and needs nothing from elsewhere.
TEST(Visualize, Pages) {
  const std::string page =
      visualize_text("[S(0), R] on mesh(dp=2, tp=2): bf16[8, 4]", "", PictureFormat::html);
  EXPECT_THAT(
      page,
      HasSubstr("data-ranks=\"0 1\" data-info=\"ranks 0,1  |  [0:4, 0:4]  |  4 x 4  |  32 B on each\""));
  EXPECT_THAT(page, ::testing::Not(HasSubstr("src=")));
  EXPECT_THAT(page, ::testing::Not(HasSubstr("href=")));
  EXPECT_THAT(visualize_text("[S(0)] on mesh(2): f32[4]", "", PictureFormat::coloured),
              HasSubstr("\033[48;5;24;97m"));
  EXPECT_EQ(parse_picture_format("svg"), PictureFormat::svg);
  expect_error<c10::ValueError>([] { parse_picture_format("png"); }, {"\"png\"", "\"html\""});
}

/// The blocks of any spec together are all elements, once for each replica, and where the spec says.
TEST(Visualize, BlocksAreTheElementsOfEachRank) {
  std::mt19937 random(11);
  for (int i = 0; i < 200; ++i) {
    const std::vector<int64_t> mesh_shape{1 + int64_t(random() % 4), 1 + int64_t(random() % 3)};
    const DeviceMesh mesh = fake_mesh(mesh_shape);
    std::vector<int64_t> shape(1 + random() % 3);
    for (int64_t& size : shape) size = static_cast<int64_t>(random() % 7);
    Placements placements;
    for (int m = 0; m < 2; ++m) {
      const auto dim = static_cast<int64_t>(random() % shape.size());
      const Placement choices[] = {Replicate(), Partial(), Shard(dim), StridedShard(dim, 2)};
      placements.push_back(choices[random() % 4]);
    }
    const Spec spec(mesh, placements, shape);
    const Tiling tiling = Tiling::of(spec);
    int64_t held = 0, expected = 0;
    for (const Tiling::Block& block : tiling.blocks) {
      int64_t numel = static_cast<int64_t>(block.ranks.size());
      for (const int64_t size : block.shape) numel *= size;
      held += numel;
    }
    for (const c10::DimVector& coordinate : mesh.coordinates()) {
      int64_t numel = 1;
      for (const int64_t size : spec.local_shape(coordinate)) numel *= size;
      expected += numel;
    }
    EXPECT_EQ(held, expected) << spec;
    for (const PictureFormat format : {PictureFormat::text, PictureFormat::coloured, PictureFormat::html})
      EXPECT_THAT(visualize(spec, format), HasSubstr("on mesh("));
  }
}

}  // namespace
}  // namespace tessera
