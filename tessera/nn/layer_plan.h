#pragma once

#include <tessera/export.h>
#include <tessera/placement/placement.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// What ColwiseParallel and RowwiseParallel mean for each kind of layer. Pure data, without modules and
/// ranks: C++ modules and Python modules are parallelized from the same table.
namespace tessera {

/// The layers that can be sharded, by how their parameters lie.
enum class LayerKind : uint8_t {
  linear,             // weight [outputs, inputs]
  linear_transposed,  // weight [inputs, outputs], as Conv1D of transformers
  embedding,          // weight [rows, columns]; EmbeddingBag too
  conv1d,             // weight [output channels, input channels / groups, ...]
  conv2d,
  conv3d,
  conv_transpose1d,  // weight [input channels, output channels / groups, ...]
  conv_transpose2d,
  conv_transpose3d,
  multihead_attention,
};

enum class LayerStyle : uint8_t {
  colwise,  // shard what the layer returns
  rowwise,  // shard what the layer sums over
};

/// "linear", "conv_transpose1d", ...
TESSERA_API std::string_view name_of(LayerKind kind);
/// None if no kind has that name.
TESSERA_API std::optional<LayerKind> layer_kind(std::string_view name);
/// "ColwiseParallel", "RowwiseParallel"
TESSERA_API std::string_view name_of(LayerStyle style);

/// Placements are those along the mesh dim that the style applies to; dims that count from the end are those
/// of inputs and outputs, which may lack a batch.
struct TESSERA_API LayerPlan {
  struct Parameter {
    std::string name;  // dotted if it is a submodule's
    Placement placement;
  };
  /// Those that a layer lacks (a bias) are skipped.
  std::vector<Parameter> parameters;
  /// The arguments that `input` is about, in the order of the call. Other tensors that the layer is called
  /// with (offsets, masks) are replicated.
  std::vector<std::string> inputs;
  /// How the layer needs its inputs.
  Placement input;
  /// How the layer returns its output unless it is asked for another layout.
  Placement output;
  /// The dim of the weight that is as long as the last dim of the input, if there is one.
  std::optional<int64_t> feature_dim = {};

  /// Whether the gradients of the inputs are partial values, as ranks compute with different shards of the
  /// parameters from the same input. The layer then reduces them where it begins, once for all that is
  /// before it.
  bool reduces_input_gradient = false;

  /// "weight S(0), bias S(0): input R (gradient reduced) -> S(-1)"
  std::string str() const;
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const LayerPlan& plan);
};

/// What the style means for a layer; none if it means nothing there. `blocks`: into how many pieces of one
/// size the model splits the output of a colwise layer. Each of them is sharded, so that splitting does not
/// communicate. A projection to queries, keys and values in one has 3.
TESSERA_API std::optional<LayerPlan> layer_plan(LayerStyle style, LayerKind kind, int64_t blocks = 1);

/// Throws NotImplementedError, which names the layers that the style knows.
[[noreturn]] TESSERA_API void refuse_layer(LayerStyle style, std::string_view module);

}  // namespace tessera
