#pragma once

#include <tessera/export.h>
#include <tessera/random/generator.h>

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

/// Plain tensors of the same values that distributed ones have: random::randn({4, 6}) is what
/// tessera::randn({4, 6}, mesh, placements).full_tensor() is at the same state, on any mesh and placed in any
/// way. Each function makes one call, so ranks that share a generator must all make it.
///
/// Arguments are those of libtorch's functions of these names. libtorch's own generators are neither used nor
/// disturbed.
namespace tessera::random {

TESSERA_API at::Tensor rand(c10::IntArrayRef size, const at::TensorOptions& options = {},
                            Generator generator = default_generator());
TESSERA_API at::Tensor randn(c10::IntArrayRef size, const at::TensorOptions& options = {},
                             Generator generator = default_generator());
/// Integers in [low, high), by default of int64.
TESSERA_API at::Tensor randint(int64_t low, int64_t high, c10::IntArrayRef size,
                               const at::TensorOptions& options = {},
                               Generator generator = default_generator());
/// A permutation of 0, ..., n - 1, by default of int64.
TESSERA_API at::Tensor randperm(int64_t n, const at::TensorOptions& options = {},
                                Generator generator = default_generator());

TESSERA_API const at::Tensor& uniform_(const at::Tensor& self, double from = 0, double to = 1,
                                       Generator generator = default_generator());
TESSERA_API const at::Tensor& normal_(const at::Tensor& self, double mean = 0, double std = 1,
                                      Generator generator = default_generator());
TESSERA_API const at::Tensor& log_normal_(const at::Tensor& self, double mean = 1, double std = 2,
                                          Generator generator = default_generator());
TESSERA_API const at::Tensor& exponential_(const at::Tensor& self, double lambd = 1,
                                           Generator generator = default_generator());
TESSERA_API const at::Tensor& cauchy_(const at::Tensor& self, double median = 0, double sigma = 1,
                                      Generator generator = default_generator());
TESSERA_API const at::Tensor& geometric_(const at::Tensor& self, double p,
                                         Generator generator = default_generator());
TESSERA_API const at::Tensor& bernoulli_(const at::Tensor& self, double p = 0.5,
                                         Generator generator = default_generator());
TESSERA_API const at::Tensor& bernoulli_(const at::Tensor& self, const at::Tensor& p,
                                         Generator generator = default_generator());
/// Integers up to the largest that the dtype has.
TESSERA_API const at::Tensor& random_(const at::Tensor& self, Generator generator = default_generator());
TESSERA_API const at::Tensor& random_(const at::Tensor& self, int64_t from, std::optional<int64_t> to,
                                      Generator generator = default_generator());

/// 1 with the probability that each element says.
TESSERA_API at::Tensor bernoulli(const at::Tensor& p, Generator generator = default_generator());
TESSERA_API at::Tensor multinomial(const at::Tensor& weights, int64_t count, bool replacement = false,
                                   Generator generator = default_generator());
/// Differentiable. With train == false the input itself, and no call is made.
TESSERA_API at::Tensor dropout(const at::Tensor& input, double p, bool train = true,
                               Generator generator = default_generator());

}  // namespace tessera::random
