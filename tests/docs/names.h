#pragma once

#include <tessera/tessera.h>

#include <iostream>

#include <torch/torch.h>

/// What the examples of README.md and docs/ presume: names that the text around them explains. Nothing is defined, as the
/// examples are compiled but not run.
using namespace tessera;

namespace docs {

struct ModelImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x);
  torch::nn::Embedding items;
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Model);

extern DeviceMesh mesh;
extern at::Tensor x, y, full, local, batch, targets, loss;
extern Model model, attention;
extern torch::nn::Dropout layer;

namespace page_sharded {
using namespace tessera::sharded;
extern ShardedTensor items;
extern at::Tensor weight, indices;
extern ChunkShardingSpec rows, columns;
}  // namespace page_sharded

namespace page_parallel {
extern at::Tensor q, k, v;
}  // namespace page_parallel

namespace page_checkpoint {
extern at::Tensor weight;
extern torch::optim::Adam optimizer;
}  // namespace page_checkpoint

}  // namespace docs
