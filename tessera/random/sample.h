#pragma once

#include <tessera/export.h>
#include <tessera/random/fill.h>

#include <cstdint>
#include <tuple>

#include <ATen/core/Tensor.h>

/// Random functions of tensors, and others whose elements are not independent of each other; each on that
/// part of its arguments that a region says.
namespace tessera::random {

/// Writes 1 with the probability that the corresponding element of `p` says, else 0. `p` is broadcast to
/// `out`.
TESSERA_API void bernoulli_into(const at::Tensor& out, const at::Tensor& p, const Region& region,
                                const Draw& draw);

/// Normal numbers with these means and standard deviations, of which one may be a scalar tensor; on the
/// device and of the dtype that `options` say.
TESSERA_API at::Tensor normal_of(const at::Tensor& mean, const at::Tensor& std,
                                 const at::TensorOptions& options, const Region& region, const Draw& draw);

/// The input with each element set to 0 with probability p and multiplied by 1 / (1 - p) otherwise, and which
/// were kept.
TESSERA_API std::tuple<at::Tensor, at::Tensor> dropout_of(const at::Tensor& input, double p,
                                                          const Region& region, const Draw& draw);

/// The input with each element that is not positive multiplied by a number from [lower, upper), and writes
/// into `noise` what each was multiplied by.
TESSERA_API at::Tensor rrelu_of(const at::Tensor& input, const at::Tensor& noise, double lower, double upper,
                                const Region& region, const Draw& draw);

/// Part of a permutation of 0, ..., n - 1, all of which are equally likely up to n = 65536; larger ones are
/// made of rounds of a cipher, which do not need what is elsewhere.
TESSERA_API void permutation_into(const at::Tensor& out, const Region& region, const Draw& draw);

/// For each row of weights, of which the region says which there are, `count` of its indices: independent of
/// each other with replacement, else all different. The region is that of the result, of shape [rows, count]
/// or [count].
TESSERA_API at::Tensor multinomial_of(const at::Tensor& weights, int64_t count, bool replacement,
                                      const Region& region, const Draw& draw);

}  // namespace tessera::random
