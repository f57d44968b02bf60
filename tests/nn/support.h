#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tests/support/test_device.h"

/// What the tests of modules share.
namespace tessera::testing {

/// Small values, the same on every rank.
at::Tensor small(at::IntArrayRef shape, int64_t seed = 0);

/// Gives the parameters such values.
void fill(torch::nn::Module& module);

/// The global tensor, if it is distributed.
at::Tensor unsharded(const at::Tensor& tensor);

}  // namespace tessera::testing
