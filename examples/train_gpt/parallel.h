#pragma once

#include <tessera/nn/replicate.h>
#include <tessera/nn/style.h>

#include <torch/nn/module.h>

namespace gpt {

/// Distributes the model on a mesh with the dims "dp" and "tp".
inline void parallelize(torch::nn::Module& model, const tessera::DeviceMesh& mesh, bool sequence_parallel) {
  using namespace tessera;
  // Between the blocks each rank of "tp" has all of its batch, or its shard of the sequences.
  const Placement stream = sequence_parallel ? Shard(1) : Replicate();
  ParallelPlan plan{
      {"tokens", RowwiseParallel({.output_layouts = stream})},
      {"blocks.*.qkv", ColwiseParallel()},
      {"blocks.*.projection", RowwiseParallel({.output_layouts = stream})},
      {"blocks.*.up", ColwiseParallel()},
      {"blocks.*.down", RowwiseParallel({.output_layouts = stream})},
      {"head", ColwiseParallel()},
  };
  if (sequence_parallel) {
    plan.emplace_back("blocks.*.norm?", SequenceParallel());
    plan.emplace_back("norm", SequenceParallel());
  }
  parallelize_module(model, mesh, plan, {.dim = "tp"});
  replicate(model, mesh);
}

}  // namespace gpt
