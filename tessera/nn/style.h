#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
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
/// are taken as this rank's part, placed as `input_layouts` says; on a mesh of several dims they are an
/// error, as nothing tells what they are along the others.
namespace tessera {

/// Where a style applies.
struct TESSERA_API ParallelDim {
  DeviceMesh mesh;
  int64_t dim = 0;
  /// The rank of the mesh whose parameters count; none: each takes its part of its own.
  std::optional<int64_t> source = 0;

  /// Replicate but for this dim.
  Placements placements(const Placement& along) const;
};

/// What to do with a module. A value; one can make one's own.
class TESSERA_API ParallelStyle {
 public:
  using Apply = std::function<void(torch::nn::Module& module, const ParallelDim& where)>;
  explicit ParallelStyle(Apply apply) : apply_(std::move(apply)) {}
  void apply(torch::nn::Module& module, const ParallelDim& where) const { apply_(module, where); }

 private:
  Apply apply_;
};

struct LayerStyleOptions {
  /// How plain inputs are placed.
  std::optional<Placement> input_layouts = {};
  /// How the output is to be placed.
  std::optional<Placement> output_layouts = {};
  /// Return this rank's part as a plain tensor.
  bool use_local_output = false;
};

/// Cuts what a module gives: the output features of Linear, the columns of Embedding, the output channels of
/// convolutions, the heads of MultiheadAttention, whose output projection is then cut by rows. By default
/// inputs are replicated, and outputs cut along what was cut.
class TESSERA_API ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(LayerStyleOptions options = {});
};

/// Cuts what a module sums over: the input features of Linear, the rows of Embedding, the input channels of
/// convolutions. By default inputs are cut so (those of Embedding are replicated), and outputs replicated.
class TESSERA_API RowwiseParallel : public ParallelStyle {
 public:
  explicit RowwiseParallel(LayerStyleOptions options = {});
};

struct SequenceParallelOptions {
  int64_t sequence_dim = 1;
  bool use_local_output = false;
};

/// Replicates the parameters and cuts inputs along their sequence: LayerNorm and the like. Modules without
/// parameters (Dropout, GELU) need no style: they compute on what they get as it is placed.
class TESSERA_API SequenceParallel : public ParallelStyle {
 public:
  explicit SequenceParallel(SequenceParallelOptions options = {});
};

/// Of each tensor that a module is called with, or returns; none for one that is left alone.
using Layouts = std::vector<std::optional<Placement>>;

struct PrepareInputOptions {
  Layouts input_layouts;
  Layouts desired_input_layouts;
  /// Give the module this rank's parts as plain tensors.
  bool use_local_output = false;
};

/// Places what a module is called with: see hooks.h for when this is done.
class TESSERA_API PrepareModuleInput : public ParallelStyle {
 public:
  explicit PrepareModuleInput(PrepareInputOptions options);
};

struct PrepareOutputOptions {
  Layouts output_layouts;
  Layouts desired_output_layouts;
  bool use_local_output = false;
};

/// Places what a module returns.
class TESSERA_API PrepareModuleOutput : public ParallelStyle {
 public:
  explicit PrepareModuleOutput(PrepareOutputOptions options);
};

/// Both.
class TESSERA_API PrepareModuleInputOutput : public ParallelStyle {
 public:
  PrepareModuleInputOutput(PrepareInputOptions inputs, PrepareOutputOptions outputs);
};

/// Styles by dotted name, in which each part may have wildcards (*, ?, [...]): "layers.*.mlp.up". "" is the
/// module itself.
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
