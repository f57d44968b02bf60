// What the styles mean, as data: no modules, no ranks.

#include <tessera/nn/layer_plan.h>

#include <sstream>

#include "tests/support/errors.h"

namespace tessera {
namespace {

using testing::expect_error;

constexpr auto kKinds = {LayerKind::linear,           LayerKind::linear_transposed,
                         LayerKind::embedding,        LayerKind::conv1d,
                         LayerKind::conv2d,           LayerKind::conv3d,
                         LayerKind::conv_transpose1d, LayerKind::conv_transpose2d,
                         LayerKind::conv_transpose3d, LayerKind::multihead_attention};

/// One line for each kind of layer that the style knows.
std::string table(LayerStyle style) {
  std::ostringstream out;
  for (const LayerKind kind : kKinds) {
    if (const auto plan = layer_plan(style, kind)) out << name_of(kind) << ": " << *plan << '\n';
  }
  return out.str();
}

TEST(LayerPlan, Colwise) {
  EXPECT_EQ(table(LayerStyle::colwise),
            R"(linear: weight S(0), bias S(0): input R (gradient reduced) -> S(-1)
linear_transposed: weight S(1), bias S(0): x R (gradient reduced) -> S(-1)
embedding: weight S(1): input R -> S(-1)
conv1d: weight S(0), bias S(0): input R (gradient reduced) -> S(-2)
conv2d: weight S(0), bias S(0): input R (gradient reduced) -> S(-3)
conv3d: weight S(0), bias S(0): input R (gradient reduced) -> S(-4)
conv_transpose1d: weight S(1), bias S(0): input R (gradient reduced) -> S(-2)
conv_transpose2d: weight S(1), bias S(0): input R (gradient reduced) -> S(-3)
conv_transpose3d: weight S(1), bias S(0): input R (gradient reduced) -> S(-4)
multihead_attention: in_proj_weight SS(0, 3), in_proj_bias SS(0, 3), q_proj_weight S(0), k_proj_weight S(0), v_proj_weight S(0), bias_k S(2), bias_v S(2), out_proj.weight S(1), out_proj.bias R: query, key, value R (gradient reduced) -> R
)");
}

TEST(LayerPlan, Rowwise) {
  EXPECT_EQ(table(LayerStyle::rowwise),
            R"(linear: weight S(1), bias R: input S(-1) -> R
linear_transposed: weight S(0), bias R: x S(-1) -> R
embedding: weight S(0): input R -> R
conv1d: weight S(1), bias R: input S(-2) -> R
conv2d: weight S(1), bias R: input S(-3) -> R
conv3d: weight S(1), bias R: input S(-4) -> R
conv_transpose1d: weight S(0), bias R: input S(-2) -> R
conv_transpose2d: weight S(0), bias R: input S(-3) -> R
conv_transpose3d: weight S(0), bias R: input S(-4) -> R
)");
}

/// The weight says how long the last dim of the input is, where it does.
TEST(LayerPlan, FeatureDims) {
  for (const LayerStyle style : {LayerStyle::colwise, LayerStyle::rowwise}) {
    EXPECT_EQ(layer_plan(style, LayerKind::linear)->feature_dim, 1);
    EXPECT_EQ(layer_plan(style, LayerKind::linear_transposed)->feature_dim, 0);
    EXPECT_EQ(layer_plan(style, LayerKind::embedding)->feature_dim, std::nullopt);
    EXPECT_EQ(layer_plan(style, LayerKind::conv1d)->feature_dim, std::nullopt);
  }
}

TEST(LayerPlan, Blocks) {
  EXPECT_EQ(layer_plan(LayerStyle::colwise, LayerKind::linear, 3)->str(),
            "weight SS(0, 3), bias SS(0, 3): input R (gradient reduced) -> SS(-1, 3)");
  expect_error<c10::ValueError>([] { layer_plan(LayerStyle::colwise, LayerKind::linear, 0); },
                                {"ColwiseParallel", "positive; got 0"});
  expect_error<c10::ValueError>([] { layer_plan(LayerStyle::rowwise, LayerKind::linear, 2); },
                                {"RowwiseParallel", "linear", "got 2"});
  expect_error<c10::ValueError>([] { layer_plan(LayerStyle::colwise, LayerKind::multihead_attention, 3); },
                                {"multihead_attention", "got 3"});
}

TEST(LayerPlan, Names) {
  for (const LayerKind kind : kKinds) EXPECT_EQ(layer_kind(name_of(kind)), kind);
  EXPECT_EQ(layer_kind("relu"), std::nullopt);
  expect_error<c10::NotImplementedError>([] { refuse_layer(LayerStyle::colwise, "ReLU"); },
                                         {"ColwiseParallel", "shard a ReLU", "MultiheadAttention"});
}

}  // namespace
}  // namespace tessera
