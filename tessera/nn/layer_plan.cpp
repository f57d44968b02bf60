#include <tessera/error.h>
#include <tessera/nn/layer_plan.h>

#include <array>
#include <ostream>
#include <sstream>
#include <utility>

namespace tessera {

namespace {

/// A kind of layer that is one product (or lookup) with its weight.
struct Layer {
  LayerKind kind;
  std::string_view name, input;
  int64_t output_dim, input_dim;  // of the weight
  int64_t activation_dim;         // the same of output and input, from the end
};

constexpr auto kLayers = std::to_array<Layer>({
    {LayerKind::linear, "linear", "input", 0, 1, -1},
    {LayerKind::linear_transposed, "linear_transposed", "x", 1, 0, -1},
    {LayerKind::embedding, "embedding", "input", 1, 0, -1},
    {LayerKind::conv1d, "conv1d", "input", 0, 1, -2},
    {LayerKind::conv2d, "conv2d", "input", 0, 1, -3},
    {LayerKind::conv3d, "conv3d", "input", 0, 1, -4},
    {LayerKind::conv_transpose1d, "conv_transpose1d", "input", 1, 0, -2},
    {LayerKind::conv_transpose2d, "conv_transpose2d", "input", 1, 0, -3},
    {LayerKind::conv_transpose3d, "conv_transpose3d", "input", 1, 0, -4},
});
constexpr std::string_view kAttention = "multihead_attention";

const Layer& layer_of(LayerKind kind) {
  for (const Layer& layer : kLayers) {
    if (layer.kind == kind) return layer;
  }
  TORCH_INTERNAL_ASSERT(false, "a kind of layer that is not in the table");
}

/// Each rank has the queries, keys and values of its heads, and multiplies them by its rows of the output
/// projection.
LayerPlan attention_plan() {
  // Three matrices, one below the other: each is sharded.
  const Placement in_proj = StridedShard(0, 3);
  LayerPlan plan;
  plan.parameters = {
      {"in_proj_weight", in_proj}, {"in_proj_bias", in_proj},     {"q_proj_weight", Shard(0)},
      {"k_proj_weight", Shard(0)}, {"v_proj_weight", Shard(0)},   {"bias_k", Shard(2)},
      {"bias_v", Shard(2)},        {"out_proj.weight", Shard(1)}, {"out_proj.bias", Replicate()}};
  plan.inputs = {"query", "key", "value"};
  plan.reduces_input_gradient = true;
  return plan;
}

LayerPlan plan_of(const Layer& layer, LayerStyle style, int64_t blocks) {
  const bool colwise = style == LayerStyle::colwise, looks_up = layer.kind == LayerKind::embedding;
  const auto shard = [&](int64_t dim) { return blocks == 1 ? Shard(dim) : StridedShard(dim, blocks); };
  LayerPlan plan;
  plan.parameters = {{"weight", shard(colwise ? layer.output_dim : layer.input_dim)}};
  if (!looks_up) plan.parameters.push_back({"bias", colwise ? shard(0) : Replicate()});
  plan.inputs = {std::string(layer.input)};
  plan.input = colwise || looks_up ? Replicate() : shard(layer.activation_dim);
  plan.output = colwise ? shard(layer.activation_dim) : Replicate();
  if (!looks_up && layer.activation_dim == -1) plan.feature_dim = layer.input_dim;
  plan.reduces_input_gradient = colwise && !looks_up;
  return plan;
}

}  // namespace

std::string_view name_of(LayerKind kind) {
  return kind == LayerKind::multihead_attention ? kAttention : layer_of(kind).name;
}

std::optional<LayerKind> layer_kind(std::string_view name) {
  if (name == kAttention) return LayerKind::multihead_attention;
  for (const Layer& layer : kLayers) {
    if (layer.name == name) return layer.kind;
  }
  return std::nullopt;
}

std::string_view name_of(LayerStyle style) {
  return style == LayerStyle::colwise ? "ColwiseParallel" : "RowwiseParallel";
}

std::string LayerPlan::str() const {
  std::ostringstream out;
  const char* separator = "";
  for (const auto& [name, placement] : parameters)
    out << std::exchange(separator, ", ") << name << ' ' << placement;
  out << ": ";
  separator = "";
  for (const std::string& name : inputs) out << std::exchange(separator, ", ") << name;
  out << ' ' << input << (reduces_input_gradient ? " (gradient reduced)" : "") << " -> " << output;
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const LayerPlan& plan) { return out << plan.str(); }

std::optional<LayerPlan> layer_plan(LayerStyle style, LayerKind kind, int64_t blocks) {
  TESSERA_CHECK_VALUE(blocks >= 1, name_of(style),
                      ": blocks is the number of pieces that the output is split into, and positive; got ",
                      blocks, ".");
  TESSERA_CHECK_VALUE(
      blocks == 1 || (style == LayerStyle::colwise && kind != LayerKind::multihead_attention), name_of(style),
      ": blocks says how the model splits the output of a layer that is sharded by columns, and has no "
      "meaning for ",
      name_of(kind), " here; got ", blocks, ".");
  if (kind != LayerKind::multihead_attention) return plan_of(layer_of(kind), style, blocks);
  if (style == LayerStyle::colwise) return attention_plan();
  return std::nullopt;
}

void refuse_layer(LayerStyle style, std::string_view module) {
  throw c10::NotImplementedError(
      c10::str(name_of(style), ": does not know how to shard a ", module,
               "; it knows Linear, Conv1D of transformers, Embedding, EmbeddingBag",
               style == LayerStyle::colwise ? ", convolutions and MultiheadAttention" : " and convolutions",
               ". Distribute its parameters with distribute_module or a ParallelStyle of your own, and "
               "redistribute its inputs and outputs with PrepareModuleInputOutput."),
      nullptr);
}

}  // namespace tessera
