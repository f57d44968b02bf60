#include "tests/nn/support.h"

#include <tessera/dtensor/dtensor.h>

#include "tests/support/compare.h"

namespace tessera::testing {

at::Tensor small(at::IntArrayRef shape, int64_t seed) { return numbers(shape, seed) / 10; }

void fill(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  int64_t seed = 0;
  for (at::Tensor& parameter : module.parameters()) parameter.copy_(small(parameter.sizes(), seed++));
}

at::Tensor unsharded(const at::Tensor& tensor) {
  return DTensor::is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
}

}  // namespace tessera::testing
