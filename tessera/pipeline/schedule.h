#pragma once

#include <tessera/export.h>
#include <tessera/pipeline/runner.h>
#include <tessera/pipeline/stage.h>
#include <tessera/pipeline/table.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

struct PipelineOptions {
  /// The loss is a mean over the samples: a micro-batch counts as much as it has samples of the batch. Else losses of
  /// micro-batches, and their gradients, are added.
  bool scale_grads = true;
  /// Return the outputs of the last stage.
  bool return_outputs = false;
};

/// Trains the stages of a model together. Each rank along the mesh dim of the stages has one, and calls it with the others.
///
///   PipelineStage stage(part, rank, 4, mesh["pp"]);
///   Schedule1F1B schedule(stage, 8, torch::nn::functional::cross_entropy);
///   auto loss = schedule.step(batch, targets).loss;          // inputs on the first stage, targets and loss on the last
///   optimizer.step();
///
/// `step` splits the batch into micro-batches (microbatch.h), computes forward and backward of each as its table says,
/// and adds up the gradients: those of the loss of the whole batch, as on one device. Gradients of a module that was
/// replicated are reduced once, in the last backward.
class TESSERA_API PipelineSchedule {
 public:
  using Tensors = PipelineStage::Tensors;
  using LossFn = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  /// Runs any table that can run (simulate.h). `stages`: those of this rank, in order. Collective over the stages' mesh.
  PipelineSchedule(std::vector<PipelineStage> stages, PipelineTable table, LossFn loss_fn = {},
                   PipelineOptions options = {});

  const PipelineTable& table() const { return runner_.table(); }

  /// Forward and backward of all micro-batches. `inputs` are looked at on the rank of the first stage, `target` on that of
  /// the last. Results are on the rank of the last stage; elsewhere they are empty. Collective.
  PipelineResult step(const Tensors& inputs, const at::Tensor& target = {});
  PipelineResult step(const at::Tensor& input = {}, const at::Tensor& target = {});

  /// Forward only, without gradients; the loss if there is a target.
  PipelineResult eval(const Tensors& inputs, const at::Tensor& target = {});
  PipelineResult eval(const at::Tensor& input = {}, const at::Tensor& target = {});

 private:
  PipelineResult run(PipelineRunner& runner, const Tensors& inputs, const at::Tensor& target);
  void split(const PipelineRunner& runner, const Tensors& inputs, const at::Tensor& target,
             PipelineBatch& batch) const;

  std::vector<PipelineStage> stages_;
  PipelineRunner runner_;
  std::unique_ptr<PipelineRunner> evaluator_;  // made when it is needed
  LossFn loss_fn_;
  PipelineOptions options_;
};

/// All forwards, then all backwards.
class TESSERA_API ScheduleGPipe : public PipelineSchedule {
 public:
  ScheduleGPipe(PipelineStage stage, int64_t n_microbatches, LossFn loss_fn = {},
                PipelineOptions options = {});
};

/// One forward, one backward in turn.
class TESSERA_API Schedule1F1B : public PipelineSchedule {
 public:
  Schedule1F1B(PipelineStage stage, int64_t n_microbatches, LossFn loss_fn = {},
               PipelineOptions options = {});
};

/// The same with several stages on each rank.
class TESSERA_API ScheduleInterleaved1F1B : public PipelineSchedule {
 public:
  ScheduleInterleaved1F1B(std::vector<PipelineStage> stages, int64_t n_microbatches, LossFn loss_fn = {},
                          PipelineOptions options = {});
};

}  // namespace tessera
