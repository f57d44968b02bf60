#include <tessera/error.h>
#include <tessera/random/philox.h>
#include <tessera/random/sample.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/util/irange.h>

namespace tessera::random {

namespace {

/// What is compared with probabilities: 53 bits for double, else 24.
at::Tensor units(const at::Tensor& like, at::ScalarType dtype, const Region& region, const Draw& draw) {
  return filled(region, like.options().dtype(dtype), Distribution::uniform(), draw);
}

/// A permutation of [0, n) that can be asked for each value: rounds of a Feistel network on numbers of an
/// even number of bits, again and again until the value is below n.
class Cipher {
 public:
  Cipher(uint64_t n, const Draw& draw) : n_(n) {
    half_ = std::max(1, (static_cast<int>(std::bit_width(n - 1)) + 1) / 2);
    mask_ = (uint64_t{1} << half_) - 1;
    for (const int round : c10::irange(kRounds)) keys_[round] = word(static_cast<uint32_t>(round), draw);
  }

  uint64_t operator()(uint64_t x) const {
    do x = once(x);
    while (x >= n_);
    return x;
  }

 private:
  static constexpr int kRounds = 12;

  static uint64_t word(uint32_t number, const Draw& draw) {
    const auto words =
        philox({number, 0, static_cast<uint32_t>(draw.call), static_cast<uint32_t>(draw.call >> 32)},
               {static_cast<uint32_t>(draw.key), static_cast<uint32_t>(draw.key >> 32)});
    return uint64_t{words[1]} << 32 | words[0];
  }

  uint64_t once(uint64_t x) const {
    uint64_t left = x >> half_, right = x & mask_;
    for (const uint64_t key : keys_) {
      uint64_t mixed = (right ^ key) * 0x9e3779b97f4a7c15;
      mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93;
      const uint64_t next = left ^ ((mixed ^ mixed >> 32) & mask_);
      left = right;
      right = next;
    }
    return left << half_ | right;
  }

  uint64_t n_, mask_;
  int half_;
  uint64_t keys_[kRounds];
};

/// All of a permutation, every one equally likely (Fisher and Yates).
std::vector<int64_t> shuffled(int64_t n, const Draw& draw) {
  std::vector<int64_t> values(n);
  std::iota(values.begin(), values.end(), 0);
  const at::Tensor bits = at::empty({n}, at::kDouble);
  fill(bits, Region::all(bits.sizes()), Distribution::uniform(), draw);
  const double* unit = bits.const_data_ptr<double>();
  for (int64_t last = n - 1; last > 0; --last)
    std::swap(values[last], values[static_cast<int64_t>(unit[last] * static_cast<double>(last + 1))]);
  return values;
}

constexpr int64_t kLargestShuffle = 1 << 16;

void check_weights(const double* row, int64_t count, bool replacement, int64_t wanted) {
  double sum = 0;
  int64_t positive = 0;
  for (const int64_t i : c10::irange(count)) {
    TESSERA_CHECK(row[i] >= 0 && std::isfinite(row[i]),
                  "multinomial: weights must be finite and not negative, got ", row[i], ".");
    sum += row[i];
    positive += row[i] > 0;
  }
  TESSERA_CHECK(sum > 0, "multinomial: the sum of a row of weights is ", sum, "; it must be positive.");
  TESSERA_CHECK(replacement || positive >= wanted, "multinomial: cannot draw ", wanted,
                " different indices from a row with ", positive, " weights that are not zero.");
}

}  // namespace

void bernoulli_into(const at::Tensor& out, const at::Tensor& p, const Region& region, const Draw& draw) {
  const bool is_double = p.scalar_type() == at::kDouble;
  TESSERA_CHECK_AS(c10::NotImplementedError, p.is_floating_point(),
                   "bernoulli: probabilities must be floating point numbers, not ", p.scalar_type(), ".");
  TESSERA_CHECK_AS(c10::NotImplementedError, !out.is_complex(), "bernoulli: not for tensors of ",
                   out.scalar_type(), ".");
  const at::Tensor u = units(out, is_double ? at::kDouble : at::kFloat, region, draw);
  if (p.numel() > 0 && !p.is_meta())
    TESSERA_CHECK(at::logical_and(p >= 0, p <= 1).all().item<bool>(),
                  "bernoulli: probabilities must be from 0 to 1.");
  out.copy_(at::lt(u, p));
}

at::Tensor normal_of(const at::Tensor& mean, const at::Tensor& std, const at::TensorOptions& options,
                     const Region& region, const Draw& draw) {
  if (std.numel() > 0 && !std.is_meta() && !std.is_complex())
    TESSERA_CHECK((std >= 0).all().item<bool>(), "normal: standard deviations must not be negative.");
  return filled(region, options, Distribution::normal(), draw).mul_(std).add_(mean);
}

std::tuple<at::Tensor, at::Tensor> dropout_of(const at::Tensor& input, double p, const Region& region,
                                              const Draw& draw) {
  const at::Tensor kept = at::empty_like(input, input.options().dtype(at::kBool));
  fill(kept, region, Distribution::bernoulli(1 - p), draw);
  return {input.mul(kept).mul_(p == 1 ? 0 : 1 / (1 - p)), kept};
}

at::Tensor rrelu_of(const at::Tensor& input, const at::Tensor& noise, double lower, double upper,
                    const Region& region, const Draw& draw) {
  const at::Tensor factors = at::empty_like(input);
  fill(factors, region, Distribution::uniform(lower, upper), draw);
  noise.copy_(at::where(input <= 0, factors, at::ones({}, input.options())));
  return input * noise;
}

void permutation_into(const at::Tensor& out, const Region& region, const Draw& draw) {
  const int64_t n = region.shape.at(0);
  if (out.is_meta() || n == 0) return;
  const at::Tensor values = at::empty(out.sizes(), at::kLong);
  int64_t* to = values.mutable_data_ptr<int64_t>();
  if (n <= kLargestShuffle) {
    const std::vector<int64_t> all = shuffled(n, draw);
    region.for_each_run([&](uint64_t first, int64_t count) {
      to = std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(first), count, to);
    });
  } else {
    const Cipher cipher(static_cast<uint64_t>(n), draw);
    region.for_each_run([&](uint64_t first, int64_t count) {
      for (const int64_t i : c10::irange(count))
        *to++ = static_cast<int64_t>(cipher(first + static_cast<uint64_t>(i)));
    });
  }
  out.copy_(values);
}

at::Tensor multinomial_of(const at::Tensor& weights, int64_t count, bool replacement, const Region& region,
                          const Draw& draw) {
  const int64_t classes = weights.size(-1);
  TESSERA_CHECK(weights.is_floating_point(), "multinomial: weights must be floating point numbers, not ",
                weights.scalar_type(), ".");
  TESSERA_CHECK(weights.dim() == 1 || weights.dim() == 2, "multinomial: weights have 1 or 2 dims, not ",
                weights.dim(), ".");
  TESSERA_CHECK(count > 0 && classes > 0, "multinomial: cannot draw ", count, " of ", classes, " indices.");
  TESSERA_CHECK(replacement || count <= classes, "multinomial: cannot draw ", count,
                " different indices from ", classes, "; draw with replacement.");
  const at::Tensor rows = weights.to(at::kCPU, at::kDouble).reshape({-1, classes}).contiguous();
  const int64_t local_rows = rows.size(0);
  // With replacement each result has a number of its own; else each weight has.
  Region numbers = region;
  if (!replacement) {
    numbers.shape.back() = classes;
    numbers.pieces.back() = unsharded(classes);
  }
  const at::Tensor drawn =
      filled(numbers, at::kDouble, replacement ? Distribution::uniform() : Distribution::exponential(), draw);
  const at::Tensor result = at::empty({local_rows, count}, at::kLong);
  const double *weight = rows.const_data_ptr<double>(), *number = drawn.const_data_ptr<double>();
  int64_t* to = result.mutable_data_ptr<int64_t>();
  std::vector<double> keys(classes);
  std::vector<int64_t> order(classes);
  for (int64_t row = 0; row < local_rows; ++row, weight += classes, to += count) {
    check_weights(weight, classes, replacement, count);
    if (replacement) {
      std::partial_sum(weight, weight + classes, keys.begin());
      int64_t last = classes - 1;
      while (weight[last] == 0) --last;
      for (const int64_t i : c10::irange(count)) {
        const auto found = std::upper_bound(keys.begin(), keys.end(), number[i] * keys.back());
        to[i] = std::min<int64_t>(found - keys.begin(), last);
      }
      number += count;
    } else {
      // Waiting times: what has twice the weight comes twice as early.
      for (const int64_t i : c10::irange(classes)) keys[i] = weight[i] > 0 ? number[i] / weight[i] : INFINITY;
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + count, order.end(),
                        [&](int64_t a, int64_t b) { return keys[a] != keys[b] ? keys[a] < keys[b] : a < b; });
      std::copy_n(order.begin(), count, to);
      number += classes;
    }
  }
  return (weights.dim() == 1 ? result.squeeze(0) : result).to(weights.device());
}

}  // namespace tessera::random
