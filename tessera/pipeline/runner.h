#pragma once

#include <tessera/export.h>
#include <tessera/pipeline/stage.h>
#include <tessera/pipeline/table.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// What a step computes with, on this rank.
struct PipelineBatch {
  using Tensors = PipelineStage::Tensors;

  /// On the rank of the first stage: the inputs of each micro-batch, and how many samples each has.
  std::vector<Tensors> inputs = {};
  std::vector<int64_t> samples = {};
  /// Which samples are in which micro-batch (`split_rule`): of the inputs on the rank of the first stage, and of the
  /// targets on that of the last. They must be the same, unless one is empty.
  std::string input_rule = {}, target_rule = {};
  /// On the rank of the last stage: the loss of a micro-batch, a scalar; or null if none is wanted.
  std::function<at::Tensor(const Tensors& outputs, int64_t microbatch)> loss = {};
  /// Whether a micro-batch's loss counts as much as it has samples of the batch, so that the loss of the batch is a mean if
  /// that of a micro-batch is. Else losses are added.
  bool is_mean = true;
  /// Whether the outputs of the last stage are kept and returned.
  bool return_outputs = false;
  /// Why this rank cannot take part, if it cannot: all ranks throw it then, and nothing has happened.
  std::exception_ptr refusal = {};
};

/// What a step returns: on the rank of the last stage. Elsewhere everything is empty.
struct PipelineResult {
  using Tensors = PipelineStage::Tensors;

  at::Tensor loss;                 // of the batch
  std::vector<at::Tensor> losses;  // of the micro-batches
  std::vector<Tensors> outputs;    // of the micro-batches, if asked for
};

/// Runs the stages of one rank as a table says. One for each rank; all of them run together.
///
/// In the first step, stages send their neighbours shapes, dtypes and placements of what they will send. These are
/// kept as long as the inputs of the pipeline stay alike; then each message is the data alone.
///
/// If a stage throws, the world has failed: the ranks of all other stages throw too, and say why.
class TESSERA_API PipelineRunner {
 public:
  /// Collective. Throws on all ranks unless the tables are the same, can run (`check`), and have the stages where they
  /// are.
  PipelineRunner(std::vector<PipelineStage> stages, PipelineTable table);
  PipelineRunner(PipelineRunner&&) noexcept;
  PipelineRunner& operator=(PipelineRunner&&) noexcept;
  ~PipelineRunner();

  const PipelineTable& table() const;
  /// Whether this rank has the first stage, and the last one.
  bool has_first() const;
  bool has_last() const;

  /// Collective.
  PipelineResult run(const PipelineBatch& batch);

 private:
  struct State;
  class Step;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
