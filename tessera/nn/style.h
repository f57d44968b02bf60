#pragma once

#include <tessera/dtensor/context_parallel.h>
#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/distribute_module.h>
#include <tessera/placement/placement.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// How modules are computed by several ranks along one dim of a mesh. On a mesh of several dims the others
/// are left as they are: parameters are replicated there, and what flows through the model keeps its
/// placements.
///
/// What flows is distributed tensors, whose shapes are global: a model's code stays as it is. Plain tensors
/// are taken for local tensors with the placement that `input_layouts` says; on a mesh of several dims they
/// are an error, as nothing says how they are placed along the others.
///
/// What a style means for a layer is in layer_plan.h. Where ranks have partial values of the gradient of a
/// layer's input, they are reduced where the layer begins, once for layers that share an input.
namespace tessera {

/// What to do with a module. A value; one can make one's own.
class TESSERA_API ParallelStyle {
 public:
  using Apply = std::function<void(torch::nn::Module& module, const ParallelDim& where)>;
  explicit ParallelStyle(Apply apply) : apply_(std::move(apply)) {}
  void apply(torch::nn::Module& module, const ParallelDim& where) const { apply_(module, where); }

 private:
  Apply apply_;
};

struct ColwiseOptions {
  /// How plain inputs are placed; by default as the layer needs them.
  std::optional<Placement> input_layouts = {};
  /// How the output is to be placed; by default as the layer returns it.
  std::optional<Placement> output_layouts = {};
  /// Return the local tensor. Python does by default, as PyTorch does: models that were written for PyTorch's
  /// styles expect local shapes. With global ones a model's code stays as it is.
  bool use_local_output = false;
  /// Into how many pieces of one size the model splits the output; each of them is sharded, so that splitting
  /// does not communicate. A projection to queries, keys and values in one has 3.
  int64_t blocks = 1;
};

/// Shards what a module returns: the output features of Linear, the columns of Embedding and EmbeddingBag,
/// the output channels of convolutions, the heads of MultiheadAttention, whose output projection is then
/// sharded by rows. By default inputs are replicated, and outputs sharded along what was sharded.
///
/// The inputs of a MultiheadAttention are prepared where it is called by `tessera::call` (see hooks.h).
class TESSERA_API ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(ColwiseOptions options = {});
};

struct RowwiseOptions {
  /// As those of ColwiseOptions.
  std::optional<Placement> input_layouts = {};
  std::optional<Placement> output_layouts = {};
  bool use_local_output = false;
};

/// Shards what a module sums over: the input features of Linear, the rows of Embedding and EmbeddingBag, the
/// input channels of convolutions. By default inputs are sharded so (those of Embedding are replicated), and
/// outputs replicated.
class TESSERA_API RowwiseParallel : public ParallelStyle {
 public:
  explicit RowwiseParallel(RowwiseOptions options = {});
};

struct SequenceParallelOptions {
  int64_t sequence_dim = 1;
  bool use_local_output = false;
};

/// Replicates the parameters and shards inputs along their sequence: LayerNorm and the like. Modules without
/// parameters (Dropout, GELU) need no style: they compute on what they get, with its placements.
class TESSERA_API SequenceParallel : public ParallelStyle {
 public:
  explicit SequenceParallel(SequenceParallelOptions options = {});
};

struct ContextParallelStyleOptions {
  /// How attention is computed; see ContextParallelOptions.
  ContextMethod method = ContextMethod::ring;
  bool zigzag = false;
  /// Of the module's first input.
  int64_t sequence_dim = 1;
};

/// Shards what a module is called with along its sequence, and computes the attention in it so: see hooks.h for
/// when this is done. It may be a layer of attention, or a whole model. Parameters are left alone; replicate them.
class TESSERA_API ContextParallel : public ParallelStyle {
 public:
  explicit ContextParallel(ContextParallelStyleOptions options = {});
};

/// Of each tensor that a module is called with, or returns; none for one that is left alone, or is not
/// redistributed.
using Layouts = std::vector<std::optional<Placement>>;

struct PrepareInputOptions {
  Layouts input_layouts;
  Layouts desired_input_layouts;
  /// Give the module the local tensors.
  bool use_local_output = false;
};

/// Makes what a module is called with distributed, and redistributes it: see hooks.h for when this is done.
class TESSERA_API PrepareModuleInput : public ParallelStyle {
 public:
  explicit PrepareModuleInput(PrepareInputOptions options);
};

struct PrepareOutputOptions {
  Layouts output_layouts;
  Layouts desired_output_layouts;
  bool use_local_output = false;
};

/// The same for what a module returns.
class TESSERA_API PrepareModuleOutput : public ParallelStyle {
 public:
  explicit PrepareModuleOutput(PrepareOutputOptions options);
};

/// Both.
class TESSERA_API PrepareModuleInputOutput : public ParallelStyle {
 public:
  PrepareModuleInputOutput(PrepareInputOptions inputs, PrepareOutputOptions outputs);
};

/// Styles by dotted name, in which each component may have wildcards (*, ?, [...]): "layers.*.mlp.up". "" is
/// the module itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

struct ParallelizeOptions {
  /// Of a mesh of several dims: the one to use.
  std::optional<MeshDim> dim = {};
  /// See ParallelDim::source.
  std::optional<int64_t> source = 0;
};

/// Applies styles to a module's submodules, in the module itself. What the plan does not name is left alone
/// (`replicate` and `distribute_module` see to it). A name that matches nothing is an error.
///
///     parallelize_module(*model, mesh, {{"blocks.*.up", ColwiseParallel()},
///                                       {"blocks.*.down", RowwiseParallel()}}, {.dim = "tp"});
TESSERA_API void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh,
                                    const ParallelPlan& plan, const ParallelizeOptions& options = {});
TESSERA_API void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh,
                                    const ParallelStyle& style, const ParallelizeOptions& options = {});

}  // namespace tessera
