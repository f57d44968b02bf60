#include <tessera/error.h>
#include <tessera/nn/attachment.h>
#include <tessera/pipeline/stage.h>

#include <utility>

#include <torch/nn/module.h>

namespace tessera {

namespace {

std::vector<std::shared_ptr<GradientReduction>> reductions_of(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<GradientReduction>> result;
  for (const auto& each : module.modules()) {
    const Attachment* ours = find_attachment(*each);
    if (ours && ours->reduction) result.push_back(ours->reduction);
  }
  return result;
}

}  // namespace

PipelineStage::PipelineStage(std::shared_ptr<torch::nn::Module> module, Forward forward, int64_t stage_index,
                             int64_t num_stages, const DeviceMesh& mesh)
    : PipelineStage(
          std::move(forward), [module] { return reductions_of(*module); }, stage_index, num_stages, mesh,
          [module] { return module->parameters(); }) {}

PipelineStage::PipelineStage(Forward forward, Reductions reductions, int64_t stage_index, int64_t num_stages,
                             const DeviceMesh& mesh, Parameters parameters)
    : forward_(std::move(forward)),
      reductions_(std::move(reductions)),
      parameters_(std::move(parameters)),
      index_(stage_index),
      count_(num_stages),
      mesh_(mesh) {
  TESSERA_CHECK_INDEX(index_ >= 0 && index_ < count_, "PipelineStage: there is no stage ", index_, " of ",
                      count_, ".");
  TESSERA_CHECK_VALUE(mesh.ndim() == 1, "PipelineStage: stages lie along one mesh dim, but ", mesh, " has ",
                      mesh.ndim(), ". Give it the dim of the pipeline, such as mesh[\"pp\"].");
  TESSERA_CHECK_VALUE(mesh.is_member(), "PipelineStage: rank ", mesh.get_rank(), " is not in ", mesh,
                      ", so it has no stage.");
}

void PipelineStage::check_one_input(const Tensors& inputs) {
  TESSERA_CHECK_VALUE(inputs.size() == 1, "PipelineStage: this module takes one tensor, but gets ",
                      inputs.size(), ". Give the stage a function that calls it.");
}

}  // namespace tessera
