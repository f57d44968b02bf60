#include <tessera/placement/text.h>

#include <algorithm>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/placement/fake_mesh.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::expect_error;

using c10::DimVector;
using c10::IntArrayRef;

std::vector<Placement> samples() {
  std::vector<Placement> out = {Replicate(),    Shard(0),           Shard(1),
                                Shard(-1),      StridedShard(0, 2), Partial(),
                                NormPartial(2), NormPartial(0.1),   NormPartial(-3e300)};
  for (const ReduceOp op : kReduceOps) {
    if (op != ReduceOp::norm) out.push_back(Partial(op));
  }
  return out;
}

TEST(Text, OfSpecs) {
  const DeviceMesh mesh = fake_mesh({2, 4, 2}, {"dp", "tp", "x"});
  EXPECT_EQ(Spec(mesh, {Shard(0), Replicate(), Partial()}, {4096, 4096}).str(),
            "[S(0), R, P(sum)] on mesh(dp=2, tp=4, x=2): f32[4096, 4096]");
  EXPECT_EQ(Spec(mesh, {Shard(0), Shard(0), Replicate()}, {8, 4}, IntArrayRef{1, 8}, at::kBFloat16, {1, 0, 2})
                .str(),
            "[S(0), S(0), R] order (tp, dp, x) on mesh(dp=2, tp=4, x=2): bf16[8, 4] strides [1, 8]");
  EXPECT_EQ(Spec(fake_mesh({2, 4}), {Shard(0), Shard(0)}, {8}, std::nullopt, at::kBool, {1, 0}).str(),
            "[S(0), S(0)] order (1, 0) on mesh(2, 4): b8[8]");
  EXPECT_EQ(Spec(fake_mesh({2}), {NormPartial(2)}, {}).str(), "[P(norm 2)] on mesh(2): f32[]");
  EXPECT_EQ(c10::str(Spec(fake_mesh({2}), {Shard(0)}, {3})), "[S(0)] on mesh(2): f32[3]");
}

TEST(Text, MeshIsWrittenAsTheMeshWritesItself) {
  for (const DeviceMesh& mesh : {fake_mesh({2, 4}, {"dp", "tp"}), fake_mesh({2, 4}), fake_mesh({1})}) {
    const Spec spec(mesh, replicated(mesh), {3});
    EXPECT_EQ(spec.str(), c10::str(spec.placements(), " on ", mesh, ": f32[3]"));
  }
}

TEST(Text, DtypesAreNamedDifferentlyAndReadBack) {
  EXPECT_EQ(to_text(at::kFloat), "f32");
  EXPECT_EQ(to_text(at::kBFloat16), "bf16");
  EXPECT_EQ(to_text(at::kLong), "i64");
  EXPECT_EQ(to_text(at::kBool), "b8");
  EXPECT_EQ(to_text(at::kComplexDouble), "c128");
  EXPECT_EQ(to_text(at::kFloat8_e4m3fn), "f8e4m3fn");
  for (int i = 0; i < static_cast<int>(c10::ScalarType::Undefined); ++i) {
    const auto dtype = static_cast<c10::ScalarType>(i);
    EXPECT_EQ(parse_layout(c10::str("[R] on mesh(2): ", to_text(dtype), "[3]")).dtype, dtype);
  }
}

TEST(Parse, PlacementsReadBack) {
  const auto all = samples();
  for (const Placement& a : all) {
    EXPECT_EQ(parse_placement(a.str()), a) << a;
    for (const Placement& b : all) {
      EXPECT_EQ(parse_placements(to_text({a, b})), (Placements{a, b}));
    }
  }
  EXPECT_EQ(parse_placements("[]"), Placements{});
  EXPECT_EQ(parse_placement("  SS ( 0 ,2 )\t"), StridedShard(0, 2));
  EXPECT_EQ(parse_placements(" [\n S(0),R , P( norm 2.5 )] "),
            (Placements{Shard(0), Replicate(), NormPartial(2.5)}));
}

TEST(Parse, LayoutsReadBack) {
  const auto all = samples();
  int64_t cases = 0;
  for (const Placement& a : all) {
    for (const Placement& b : all) {
      for (const ShardOrder& order : {ShardOrder{}, ShardOrder{0, 1}, ShardOrder{1, 0}}) {
        for (const bool named : {false, true}) {
          for (const int parts : {0, 1, 2}) {
            Layout layout{.placements = {a, b}, .order = order, .mesh_shape = {2, 3}};
            if (named) layout.mesh_dim_names = {"dp", "t_p2"};
            if (parts > 0) {
              layout.dtype = at::kHalf;
              layout.shape = DimVector{4, 0};
            }
            if (parts > 1) layout.strides = DimVector{1, 4};
            EXPECT_EQ(parse_layout(to_text(layout)), layout) << to_text(layout);
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, static_cast<int64_t>(all.size() * all.size()) * 3 * 2 * 3);
}

TEST(Parse, LayoutParts) {
  const Layout layout =
      parse_layout("[S(0) , S(-1)]order( tp,dp )on mesh (dp = 2, tp=4) :bf16 [ 64,32 ]strides[1, 64]");
  EXPECT_EQ(layout.placements, (Placements{Shard(0), Shard(-1)}));
  EXPECT_EQ(layout.order, (ShardOrder{1, 0}));
  EXPECT_EQ(layout.mesh_shape, (DimVector{2, 4}));
  EXPECT_EQ(layout.mesh_dim_names, (std::vector<std::string>{"dp", "tp"}));
  EXPECT_EQ(layout.dtype, at::kBFloat16);
  EXPECT_EQ(layout.shape, (DimVector{64, 32}));
  EXPECT_EQ(layout.strides, (DimVector{1, 64}));
  EXPECT_EQ(parse_layout("[R, R] order (1, 0) on mesh(dp=2, tp=4)").order, (ShardOrder{1, 0}));
  EXPECT_EQ(parse_layout("[R, R] on mesh(2, 4)").dtype, std::nullopt);
}

TEST(Parse, SpecsReadBack) {
  const std::vector<Placement> some = {Replicate(),        Shard(0),  Shard(1),
                                       StridedShard(0, 2), Partial(), NormPartial(2)};
  int64_t cases = 0;
  for (const DeviceMesh& mesh : {fake_mesh({2, 3}, {"dp", "tp"}), fake_mesh({2, 3})}) {
    for (const Placement& a : some) {
      for (const Placement& b : some) {
        if (a.is_partial() && b.is_partial() && a != b) continue;
        for (const ShardOrder& order : {ShardOrder{}, ShardOrder{1, 0}}) {
          for (const DimVector& strides : {DimVector{5, 1}, DimVector{1, 4}}) {
            const Spec spec(mesh, {a, b}, {4, 5}, strides, at::kLong, order);
            EXPECT_EQ(parse_spec(spec.str(), mesh), spec) << spec;
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 2 * (36 - 2) * 2 * 2);
}

TEST(Parse, SpecIsForItsMesh) {
  const DeviceMesh mesh = fake_mesh({2, 4}, {"dp", "tp"});
  for (const char* other : {"mesh(dp=4, tp=2)", "mesh(dp=2, cp=4)", "mesh(2, 4)"}) {
    expect_error<c10::ValueError>([&] { parse_spec(c10::str("[R, R] on ", other, ": f32[2]"), mesh); },
                                  {other, "the mesh given is mesh(dp=2, tp=4)"});
  }
  expect_error<c10::ValueError>([&] { parse_spec("[R, R] on mesh(dp=2, tp=4)", mesh); },
                                {"a spec", "expected ':'"});
  expect_error<c10::IndexError>([&] { parse_spec("[S(1), R] on mesh(dp=2, tp=4): f32[2]", mesh); }, {"S(1)"});
}

struct Bad {
  std::string text;
  size_t place;
  std::string expected;
};

void expect_marked(const Bad& bad, const std::string& message) {
  const std::string shown = "\n  " + bad.text + "\n  " + std::string(bad.place, ' ') + "^";
  ASSERT_GE(message.size(), shown.size()) << message;
  EXPECT_EQ(message.substr(message.size() - shown.size()), shown) << message;
  EXPECT_NE(message.find("expected " + bad.expected), std::string::npos)
      << bad.expected << " is not in " << message;
}

TEST(Parse, BadPlacementsAreMarked) {
  const std::string placement = "a placement: R, S(dim)";
  const std::vector<Bad> all = {
      {"", 0, "'['"},
      {"S(0)", 0, "'['"},
      {"[S(0) R]", 6, "',' or ']'"},
      {"[S(0), R", 8, "',' or ']'"},
      {"[S(0),]", 6, placement},
      {"[Q]", 1, placement},
      {"[S]", 2, "'('"},
      {"[S()]", 3, "a tensor dim"},
      {"[S(x)]", 3, "a tensor dim"},
      {"[S(1.5)]", 3, "a tensor dim"},
      {"[S(99999999999)]", 3, "a tensor dim"},
      {"[SS(0)]", 5, "','"},
      {"[SS(0, 0)]", 7, "a split of at least 1"},
      {"[P(prod)]", 3, "a reduce op: sum avg product min max any all norm"},
      {"[P()]", 3, "a reduce op"},
      {"[P(norm)]", 7, "the p of a norm"},
      {"[P(norm 0)]", 8, "the p of a norm"},
      {"[P(norm inf)]", 8, "the p of a norm"},
      {"[P(sum 2)]", 7, "')'"},
      {"[R] R", 4, "the end"},
  };
  for (const Bad& bad : all) {
    expect_marked(bad, error_of<c10::ValueError>([&] { parse_placements(bad.text); }));
  }
  expect_marked({"R R", 2, "the end"}, error_of<c10::ValueError>([] { parse_placement("R R"); }));
}

TEST(Parse, BadLayoutsAreMarked) {
  const std::vector<Bad> all = {
      {"[R]", 3, "'on'"},
      {"[R] mesh(2)", 4, "'on'"},
      {"[R] on 2", 7, "'mesh'"},
      {"[R] on mesh(x)", 12, "the size of a mesh dim"},
      {"[R] on mesh(dp=0)", 15, "the size of a mesh dim"},
      {"[R] on mesh(=2)", 12, "a mesh dim name"},
      {"[R, R] on mesh(dp=2, 2)", 21, "names for all mesh dims or for none"},
      {"[R, R] on mesh(2, tp=2)", 18, "names for all mesh dims or for none"},
      {"[R, R] on mesh(dp=2, dp=2)", 21, "another name for each mesh dim"},
      {"[R] on mesh(2, 2)", 0, "one placement for each of the 2 mesh dims, not 1"},
      {"[R] order () on mesh(2)", 4, "an order that names each mesh dim exactly once"},
      {"[R, R] order (0, 0) on mesh(2, 2)", 7, "an order that names each mesh dim exactly once"},
      {"[R, R] order (dp, cp) on mesh(dp=2, tp=2)", 18, "a dim of mesh(dp=2, tp=2)"},
      {"[R, R] order (0, 2) on mesh(2, 2)", 17, "a dim of mesh(2, 2)"},
      {"[R] on mesh(2): x32[2]", 16, "a dtype"},
      {"[R] on mesh(2): f32", 19, "'['"},
      {"[R] on mesh(2): f32[-1]", 20, "a size"},
      {"[R] on mesh(2): f32[2] strides [1, 1]", 23, "1 strides"},
      {"[R] on mesh(2): f32[2] stride [1]", 23, "the end"},
  };
  for (const Bad& bad : all) {
    expect_marked(bad, error_of<c10::ValueError>([&] { parse_layout(bad.text); }));
  }
}

TEST(Parse, MarkCountsCharactersAndLinesAreJoined) {
  const std::string message = error_of<c10::ValueError>([] { parse_layout("[R] on\nmesh(größe=0)"); });
  EXPECT_NE(message.find("\n  [R] on mesh(größe=0)\n" + std::string(20, ' ') + "^"), std::string::npos)
      << message;
}

}  // namespace
}  // namespace tessera
