#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

/// What the tests of modules share.
namespace tessera::testing {

/// Small numbers, the same on every rank.
at::Tensor small(at::IntArrayRef shape, int64_t seed = 0);

/// Gives the parameters such values.
void fill(torch::nn::Module& module);

/// The whole tensor, if it is distributed.
at::Tensor whole(const at::Tensor& tensor);

}  // namespace tessera::testing
