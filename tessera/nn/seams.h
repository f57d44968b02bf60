#pragma once

#include <tessera/nn/hooks.h>

#include <array>
#include <cstddef>

/// The operators that modules of libtorch use their weights with.
namespace tessera {

/// Where an operator has its weight and what it is applied to.
struct Seam {
  const char* op;
  size_t input, weight;
  WeightUse use;
  std::array<size_t, 2> other_inputs = {};  // 0: none
};

inline constexpr auto kSeams = std::to_array<Seam>({
    {"linear", 0, 1, WeightUse::linear},
    // torch::nn::functional::linear is one of these with the transposed weight.
    {"addmm", 1, 2, WeightUse::linear},
    {"matmul", 0, 1, WeightUse::linear},
    {"bilinear", 0, 2, WeightUse::other},
    {"prelu", 0, 1, WeightUse::other},
    {"embedding", 1, 0, WeightUse::embedding},
    {"embedding_bag", 1, 0, WeightUse::embedding, {2, 6}},
    {"embedding_bag.padding_idx", 1, 0, WeightUse::embedding, {2, 6}},
    {"conv1d", 0, 1, WeightUse::convolution},
    {"conv1d.padding", 0, 1, WeightUse::convolution},
    {"conv2d", 0, 1, WeightUse::convolution},
    {"conv2d.padding", 0, 1, WeightUse::convolution},
    {"conv3d", 0, 1, WeightUse::convolution},
    {"conv3d.padding", 0, 1, WeightUse::convolution},
    {"conv_transpose1d", 0, 1, WeightUse::convolution},
    {"conv_transpose2d.input", 0, 1, WeightUse::convolution},
    {"conv_transpose3d.input", 0, 1, WeightUse::convolution},
    {"layer_norm", 0, 2, WeightUse::normalization},
    {"rms_norm", 0, 2, WeightUse::normalization},
    {"group_norm", 0, 2, WeightUse::normalization},
    {"batch_norm", 0, 1, WeightUse::normalization},
    {"instance_norm", 0, 1, WeightUse::normalization},
});

}  // namespace tessera
