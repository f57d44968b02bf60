#pragma once

#include <tessera/debug/dry_run.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/nn/on_meta.h>

#include <memory>
#include <optional>

#include <torch/optim.h>

#include "parallel.h"

namespace gpt {

struct Training {
  Config model;
  Parallel parallel;
  int64_t batch = 8;
  std::optional<at::ScalarType> dtype = {};  // of parameters and all that is computed; by default float
};

/// A step of training without values, for tessera::plan_model.
inline tessera::TrainingStep training_on_meta(const Training& training, const tessera::DeviceMesh& mesh) {
  using namespace tessera;
  struct State {
    GPT model{nullptr};
    std::unique_ptr<torch::optim::AdamW> optimizer;
  };
  const auto state = std::make_shared<State>();
  {
    const OnMeta on_meta(training.dtype);
    state->model = GPT(training.model);
  }
  parallelize(state->model, mesh, training.parallel);
  state->optimizer = std::make_unique<torch::optim::AdamW>(state->model->parameters());
  return {.parameters = state->model->parameters(),
          .loss =
              [=] {
                const at::Tensor pieces = at::empty({training.batch, training.model.context + 1},
                                                    at::TensorOptions(at::kLong).device(at::kMeta));
                return loss_of(state->model,
                               distribute_tensor(pieces, mesh, {Shard(0), Replicate()}, std::nullopt));
              },
          .update = [=] { state->optimizer->step(); },
          .model = state};
}

}  // namespace gpt
