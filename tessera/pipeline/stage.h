#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/gradient_reduction.h>
#include <tessera/nn/hooks.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace tessera {

/// A part of a model that one rank along a mesh dim computes: stage 0 gets the inputs, each other one the outputs of the
/// one before it.
///
///   PipelineStage stage(block, mesh.get_local_rank("pp"), 4, mesh["pp"]);
///
/// Schedules deal stages to the ranks of the mesh in turn, stage s to rank s % mesh.size(), unless a table of yours says
/// otherwise. What stages pass on may be plain tensors, or distributed ones on other dims of the same mesh; the ranks of all
/// stages that have the same coordinate there form a pipeline.
class TESSERA_API PipelineStage {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// Outputs for the inputs of a micro-batch.
  using Forward = std::function<Tensors(const Tensors& inputs, int64_t microbatch)>;
  /// What reduces the gradients of the stage's parameters: see `replicate`.
  using Reductions = std::function<std::vector<std::shared_ptr<GradientReduction>>()>;
  /// What the stage trains, or would, if it is not frozen. Which do may change between steps.
  using Parameters = std::function<Tensors()>;

  /// `module` holds a module whose forward takes a tensor and returns one: a Linear, a Sequential, one of yours. It is
  /// called with its hooks (`tessera::call`).
  template <class Holder>
  requires requires(Holder& module, const at::Tensor& x) {
    { module->forward(x) } -> std::convertible_to<at::Tensor>;
    module.ptr();
  }
  PipelineStage(Holder module, int64_t stage_index, int64_t num_stages, const DeviceMesh& mesh)
      : PipelineStage(
            std::shared_ptr<torch::nn::Module>(module.ptr()),
            [module](const Tensors& inputs, int64_t) mutable {
              check_one_input(inputs);
              return Tensors{call(module, inputs[0])};
            },
            stage_index, num_stages, mesh) {}

  /// For modules with several inputs or outputs. Gradients of the module's parameters are reduced as `replicate` said.
  PipelineStage(std::shared_ptr<torch::nn::Module> module, Forward forward, int64_t stage_index,
                int64_t num_stages, const DeviceMesh& mesh);
  /// For what is no module.
  PipelineStage(Forward forward, Reductions reductions, int64_t stage_index, int64_t num_stages,
                const DeviceMesh& mesh, Parameters parameters = {});

  int64_t stage_index() const { return index_; }
  int64_t num_stages() const { return count_; }
  bool is_first() const { return index_ == 0; }
  bool is_last() const { return index_ + 1 == count_; }
  const DeviceMesh& mesh() const { return mesh_; }

  Tensors forward(const Tensors& inputs, int64_t microbatch) const { return forward_(inputs, microbatch); }
  std::vector<std::shared_ptr<GradientReduction>> reductions() const { return reductions_(); }
  Tensors parameters() const { return parameters_ ? parameters_() : Tensors(); }

 private:
  static void check_one_input(const Tensors& inputs);

  Forward forward_;
  Reductions reductions_;
  Parameters parameters_;
  int64_t index_, count_;
  DeviceMesh mesh_;
};

}  // namespace tessera
