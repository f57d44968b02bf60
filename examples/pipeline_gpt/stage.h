#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn.h>

#include "examples/train_gpt/gpt.h"

namespace gpt {

/// One of `count` stages of a GPT: its share of the blocks. The first one embeds the text, the last one returns logits.
/// Parameters are called as in the model, so that stages load and save its checkpoints.
struct StageImpl : torch::nn::Module {
  /// Shares the parameters of `model`. Let go of the model before you distribute the stage.
  StageImpl(const GPT& model, int64_t index, int64_t count) {
    if (index == 0) {
      tokens = register_module("tokens", model->tokens);
      positions = register_parameter("positions", model->positions);
    }
    const auto layers = static_cast<int64_t>(model->blocks->size());
    std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> own;
    for (int64_t i = layers * index / count; i < layers * (index + 1) / count; ++i)
      own.emplace_back(std::to_string(i), model->blocks->ptr(i));
    blocks = register_module("blocks", torch::nn::ModuleDict(own));
    if (index + 1 == count) {
      norm = register_module("norm", model->norm);
      head = register_module("head", model->head);
    }
  }

  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = tokens ? tokens(input) + positions.slice(0, 0, input.size(1)) : input;
    for (const auto& block : blocks->values()) x = block->as<Block>()->forward(x);
    return head ? head(norm(x)) : x;
  }

  torch::nn::Embedding tokens{nullptr};
  at::Tensor positions;
  torch::nn::ModuleDict blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Stage);

inline const bool stage_registered = (tessera::register_members<StageImpl>(&StageImpl::positions), true);

}  // namespace gpt
