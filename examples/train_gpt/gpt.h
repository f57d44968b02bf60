#pragma once

#include <tessera/nn/members.h>

#include <cmath>

#include <torch/nn.h>

/// A small GPT, as one writes it for one device: nothing here knows of ranks.
namespace gpt {

struct Config {
  int64_t vocabulary = 96;
  int64_t context = 64;
  int64_t width = 128;
  int64_t heads = 4;
  int64_t layers = 2;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Config& config) : heads(config.heads) {
    const int64_t width = config.width;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    projection = register_module("projection", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  at::Tensor attention(const at::Tensor& x) {
    // Queries, keys and values of a head lie side by side.
    const auto parts = qkv(x).view({x.size(0), x.size(1), heads, 3, x.size(2) / heads}).unbind(3);
    const at::Tensor seen =
        at::scaled_dot_product_attention(parts[0].transpose(1, 2), parts[1].transpose(1, 2),
                                         parts[2].transpose(1, 2), {}, 0.0, /*is_causal=*/true);
    return projection(seen.transpose(1, 2).flatten(2));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm1(x));
    return x + down(torch::gelu(up(norm2(x))));
  }

  int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const Config& config) {
    tokens = register_module("tokens", torch::nn::Embedding(config.vocabulary, config.width));
    positions = register_parameter("positions", torch::randn({config.context, config.width}) * 0.02);
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < config.layers; ++i) blocks->push_back(Block(config));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(config.width, config.vocabulary).bias(false)));
    const torch::NoGradGuard no_grad;
    tokens->weight.mul_(0.02);
    for (const auto& block : *blocks) {
      // What is added to the residual stream begins small.
      block->as<Block>()->projection->weight.div_(std::sqrt(2.0 * config.layers));
      block->as<Block>()->down->weight.div_(std::sqrt(2.0 * config.layers));
    }
  }

  /// The logits of what follows each token.
  at::Tensor forward(const at::Tensor& text) {
    at::Tensor x = tokens(text) + positions.slice(0, 0, text.size(1));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x));
  }

  torch::nn::Embedding tokens{nullptr};
  at::Tensor positions;
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(GPT);

/// Of what follows each token of pieces that have one more than the model sees.
inline at::Tensor loss_of(GPT& model, const at::Tensor& pieces) {
  return torch::nn::functional::cross_entropy(model->forward(pieces.slice(1, 0, -1)).flatten(0, 1),
                                              pieces.slice(1, 1).flatten());
}

/// The one line that distributing it needs: which member is a parameter of the model itself.
inline const bool registered = (tessera::register_members<GPTImpl>(&GPTImpl::positions), true);

}  // namespace gpt
