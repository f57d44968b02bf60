#pragma once

#include <tessera/nn/fully_shard.h>
#include <tessera/nn/replicate.h>
#include <tessera/nn/style.h>

#include <optional>
#include <string_view>

#include "gpt.h"

namespace gpt {

/// What the ranks of a mesh with the dims "dp" and "tp" share.
struct Parallel {
  bool tensor = true;     // along "tp": the matrices of each layer
  bool shard = false;     // along "dp": parameters, gradients and optimizer states, besides the batch
  bool sequence = false;  // along "tp": what flows between the blocks
};

/// By its name: "dp", "tp", "tp+dp", "fsdp" or "fsdp+tp". Nothing if it is none of them.
inline std::optional<Parallel> parallel_named(std::string_view name) {
  for (const std::string_view known : {"dp", "tp", "tp+dp", "fsdp", "fsdp+tp"}) {
    if (name == known)
      return Parallel{.tensor = name.find("tp") != name.npos, .shard = name.starts_with("fsdp")};
  }
  return std::nullopt;
}

inline void parallelize_tensors(torch::nn::Module& model, const tessera::DeviceMesh& mesh, bool sequence) {
  using namespace tessera;
  // Between the blocks each rank of "tp" has all of its batch, or its shard of the sequences.
  const Placement stream = sequence ? Shard(1) : Replicate();
  ParallelPlan plan{
      {"tokens", RowwiseParallel({.output_layouts = stream})},
      {"blocks.*.qkv", ColwiseParallel()},
      {"blocks.*.projection", RowwiseParallel({.output_layouts = stream})},
      {"blocks.*.up", ColwiseParallel()},
      {"blocks.*.down", RowwiseParallel({.output_layouts = stream})},
      {"head", ColwiseParallel()},
  };
  if (sequence) {
    plan.emplace_back("blocks.*.norm?", SequenceParallel());
    plan.emplace_back("norm", SequenceParallel());
  }
  parallelize_module(model, mesh, plan, {.dim = "tp"});
}

/// Distributes the model on a mesh with the dims "dp" and "tp".
inline void parallelize(GPT& model, const tessera::DeviceMesh& mesh, const Parallel& parallel) {
  using namespace tessera;
  if (parallel.tensor) parallelize_tensors(*model, mesh, parallel.sequence);
  if (!parallel.shard) return replicate(*model, mesh);
  // Each block is gathered when it computes, and the rest of the model with its first layer.
  for (const auto& block : *model->blocks) fully_shard(*block, mesh, {.dims = {"dp"}});
  fully_shard(*model, mesh, {.dims = {"dp"}});
}

}  // namespace gpt
