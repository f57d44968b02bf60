#include <tessera/error.h>
#include <tessera/pipeline/microbatch.h>
#include <tessera/pipeline/schedule.h>

#include <utility>

namespace tessera {

namespace {

/// How many ranks and how many stages on each: with the ones of this rank.
struct Extent {
  int64_t ranks, stages_per_rank;
};

Extent extent_of(const std::vector<PipelineStage>& stages) {
  TESSERA_CHECK_VALUE(!stages.empty(), "A pipeline schedule needs the stages of this rank, but got none.");
  const int64_t ranks = stages[0].mesh().size(), count = stages[0].num_stages();
  TESSERA_CHECK_VALUE(count % ranks == 0, "A pipeline of ", count, " stages cannot be dealt to the ", ranks,
                      " ranks of ", stages[0].mesh(), ": each needs the same number.");
  return {ranks, count / ranks};
}

PipelineTable single(const char* name, const PipelineStage& stage, int64_t microbatches,
                     PipelineTable (*make)(int64_t, int64_t)) {
  TESSERA_CHECK_VALUE(stage.num_stages() == stage.mesh().size(), name,
                      " has one stage on each rank, but there are ", stage.num_stages(), " stages on the ",
                      stage.mesh().size(), " ranks of ", stage.mesh(),
                      ". ScheduleInterleaved1F1B takes several.");
  return make(stage.num_stages(), microbatches);
}

PipelineTable interleaved(const std::vector<PipelineStage>& stages, int64_t microbatches) {
  const auto [ranks, stages_per_rank] = extent_of(stages);
  return PipelineTable::interleaved_1f1b(ranks, stages_per_rank, microbatches);
}

}  // namespace

PipelineSchedule::PipelineSchedule(std::vector<PipelineStage> stages, PipelineTable table, LossFn loss_fn,
                                   PipelineOptions options)
    : stages_(std::move(stages)),
      runner_(stages_, std::move(table)),
      loss_fn_(std::move(loss_fn)),
      options_(options) {}

void PipelineSchedule::split(const PipelineRunner& runner, const Tensors& inputs, const at::Tensor& target,
                             PipelineBatch& batch) const {
  const int64_t count = table().microbatches;
  if (runner.has_first()) {
    TESSERA_CHECK_VALUE(!inputs.empty() && inputs[0].defined(),
                        "A pipeline needs its inputs on the rank of the first stage, but got none.");
    batch.inputs.resize(count);
    for (const at::Tensor& input : inputs) {
      const Tensors parts = split_microbatches(input, count);
      for (int64_t i = 0; i < count; ++i) batch.inputs[i].push_back(parts[i]);
    }
    for (const Tensors& each : batch.inputs) batch.samples.push_back(each[0].size(0));
    batch.input_rule = split_rule(inputs[0], count);
  }
  if (runner.has_last() && loss_fn_ && target.defined()) {
    batch.target_rule = split_rule(target, count);
    batch.loss = [this, targets = split_microbatches(target, count)](const Tensors& outputs,
                                                                     int64_t microbatch) {
      TESSERA_CHECK_VALUE(outputs.size() == 1,
                          "The loss is a function of one output and a target, but the last stage returned ",
                          outputs.size(), " tensors.");
      return loss_fn_(outputs[0], targets[microbatch]);
    };
  }
}

PipelineResult PipelineSchedule::run(PipelineRunner& runner, const Tensors& inputs,
                                     const at::Tensor& target) {
  PipelineBatch batch;
  batch.is_mean = options_.scale_grads;
  batch.return_outputs = options_.return_outputs;
  try {
    split(runner, inputs, target, batch);
  } catch (...) {
    batch.refusal = std::current_exception();
  }
  return runner.run(batch);
}

PipelineResult PipelineSchedule::step(const Tensors& inputs, const at::Tensor& target) {
  return run(runner_, inputs, target);
}

PipelineResult PipelineSchedule::step(const at::Tensor& input, const at::Tensor& target) {
  return step(Tensors{input}, target);
}

PipelineResult PipelineSchedule::eval(const Tensors& inputs, const at::Tensor& target) {
  if (!evaluator_) evaluator_ = std::make_unique<PipelineRunner>(stages_, table().without_backward());
  return run(*evaluator_, inputs, target);
}

PipelineResult PipelineSchedule::eval(const at::Tensor& input, const at::Tensor& target) {
  return eval(Tensors{input}, target);
}

ScheduleGPipe::ScheduleGPipe(PipelineStage stage, int64_t n_microbatches, LossFn loss_fn,
                             PipelineOptions options)
    : PipelineSchedule({stage}, single("ScheduleGPipe", stage, n_microbatches, PipelineTable::gpipe),
                       std::move(loss_fn), options) {}

Schedule1F1B::Schedule1F1B(PipelineStage stage, int64_t n_microbatches, LossFn loss_fn,
                           PipelineOptions options)
    : PipelineSchedule({stage}, single("Schedule1F1B", stage, n_microbatches, PipelineTable::one_f_one_b),
                       std::move(loss_fn), options) {}

ScheduleInterleaved1F1B::ScheduleInterleaved1F1B(std::vector<PipelineStage> stages, int64_t n_microbatches,
                                                 LossFn loss_fn, PipelineOptions options)
    : PipelineSchedule(stages, interleaved(stages, n_microbatches), std::move(loss_fn), options) {}

}  // namespace tessera
