// Random numbers without ranks: known answers, the same bits on every instruction set and for every part of a
// tensor, and whether they are as their distributions say.

#include <tessera/placement/layout.h>
#include <tessera/random/fill.h>
#include <tessera/random/kernels.h>
#include <tessera/random/philox.h>
#include <tessera/random/random.h>
#include <tessera/random/sample.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/errors.h"

namespace tessera::random {
namespace {

using ::tessera::testing::expect_error;
using ::tessera::testing::same_bits;

/// From the paper's own known answers (Random123, kat_vectors).
TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

struct Form {
  std::string name;
  const Kernels& kernels;
};

/// What this machine can run.
std::vector<Form> forms() {
  std::vector<Form> result{{"baseline", baseline_kernels()}};
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) result.push_back({"avx2", avx2_kernels()});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
    result.push_back({"avx512", avx512_kernels()});
#endif
  return result;
}

TEST(Kernels, BitsAreThoseOfPhilox) {
  const Draw draw{0x0123456789abcdef, 0xfedcba9876543210};
  const uint64_t first = 0x0ffffffff;  // blocks beyond 2^32
  for (const auto& [name, kernels] : forms()) {
    std::vector<uint32_t> narrow(3 * 64);
    std::vector<uint64_t> wide(3 * 32);
    kernels.of[0][0].groups(draw, {}, first, 3, narrow.data());
    kernels.of[0][1].groups(draw, {}, first, 3, wide.data());
    for (uint64_t g = 0; g < 3; ++g) {
      for (uint64_t j = 0; j < 16; ++j) {
        const uint64_t block = (first + g) * 16 + j;
        const auto words =
            philox({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0x76543210, 0xfedcba98},
                   {0x89abcdef, 0x01234567});
        for (size_t w = 0; w < 4; ++w) ASSERT_EQ(narrow[64 * g + 16 * w + j], words[w]) << name;
        for (size_t w = 0; w < 2; ++w)
          ASSERT_EQ(wide[32 * g + 16 * w + j], uint64_t{words[2 * w]} << 32 | words[2 * w + 1]) << name;
      }
    }
  }
}

/// Every instruction set, in groups and element by element.
TEST(Kernels, AllGiveTheSameBits) {
  const Draw draw{42, 7};
  const Parameters parameters{0.5, 1.5, 1.75};
  const uint64_t first = 123456789;
  constexpr int64_t kGroups = 64;
  for (int kind = 0; kind < kKinds; ++kind) {
    for (const bool wide : {false, true}) {
      const int64_t count = kGroups * group_size(wide), bytes = count * (wide ? 8 : 4);
      std::vector<char> expected(bytes), actual(bytes);
      baseline_kernels().of[kind][wide].groups(draw, parameters, first, kGroups, expected.data());
      std::vector<uint64_t> indices(count);
      std::iota(indices.begin(), indices.end(), first * group_size(wide));
      for (const auto& [name, kernels] : forms()) {
        kernels.of[kind][wide].groups(draw, parameters, first, kGroups, actual.data());
        EXPECT_EQ(actual, expected) << name << " kind " << kind << " wide " << wide;
        kernels.of[kind][wide].elements(draw, parameters, indices.data(), count, actual.data());
        EXPECT_EQ(actual, expected) << name << " kind " << kind << " wide " << wide << " by element";
      }
    }
  }
}

/// Against the mathematical library, up to rounding.
TEST(Kernels, Functions) {
  constexpr int64_t kGroups = 256;
  auto make = [&](Kind kind, const Parameters& parameters, auto example) {
    using T = decltype(example);
    std::vector<T> result(kGroups * group_size(sizeof(T) == 8));
    kernels().of[static_cast<int>(kind)][sizeof(T) == 8].groups({1, 2}, parameters, 0, kGroups,
                                                                result.data());
    return result;
  };
  auto check = [&](auto example, double tolerance) {
    using T = decltype(example);
    const auto z = make(Kind::normal, {0, 1}, T());
    const auto powers = make(Kind::log_normal, {0, 1}, T());
    const auto far = make(Kind::log_normal, {0, 100}, T());
    for (size_t i = 0; i < z.size(); ++i) {
      const double power = std::exp(static_cast<double>(z[i]));
      ASSERT_NEAR(powers[i], power, 4 * tolerance * power);
      const double wide = std::exp(static_cast<double>(z[i] * T(100)));
      if (wide < std::numeric_limits<T>::min()) {
        ASSERT_LT(far[i], 2 * std::numeric_limits<T>::min());
      } else if (wide > std::numeric_limits<T>::max()) {
        ASSERT_EQ(far[i], std::numeric_limits<T>::infinity());
      } else {
        ASSERT_NEAR(far[i], wide, 1000 * tolerance * wide);
      }
    }
    const auto e = make(Kind::exponential, {1}, T());
    const auto steps = make(Kind::geometric, {2.5}, T());
    for (size_t i = 0; i < e.size(); ++i) {
      ASSERT_GT(e[i], 0);
      ASSERT_EQ(steps[i], std::max(T(1), std::ceil(e[i] * T(2.5))));
    }
    // The angle and the radius of pairs are independent of each other and as they should be.
    const size_t lane = 16;
    double largest = 0, radius = 0;
    for (size_t i = 0; i < z.size(); i += 2 * lane) {
      for (size_t j = i; j < i + lane; ++j) {
        radius += 0.5 * (static_cast<double>(z[j]) * z[j] + static_cast<double>(z[j + lane]) * z[j + lane]);
        largest = std::max({largest, std::abs(static_cast<double>(z[j]))});
      }
    }
    EXPECT_NEAR(radius / (static_cast<double>(z.size()) / 2), 1, 0.05);
    EXPECT_GT(largest, 3.5);
  };
  check(float(), 1.2e-7);
  check(double(), 2.3e-16);
}

std::map<std::string, Distribution> distributions() {
  return {{"uniform", Distribution::uniform(-1, 3)},
          {"normal", Distribution::normal(2, 0.5)},
          {"log_normal", Distribution::log_normal(0.5, 0.25)},
          {"exponential", Distribution::exponential(2)},
          {"cauchy", Distribution::cauchy(1, 2)},
          {"geometric", Distribution::geometric(0.3)},
          {"bernoulli", Distribution::bernoulli(0.3)},
          {"integers", Distribution::integers(3, 100)},
          {"all integers", Distribution::integers()}};
}

/// The part of a tensor that pieces describe.
at::Tensor part_of(at::Tensor global, const std::vector<Pieces>& pieces) {
  for (size_t dim = 0; dim < pieces.size(); ++dim) {
    std::vector<at::Tensor> parts;
    for (const Range& range : pieces[dim])
      parts.push_back(global.narrow(static_cast<int64_t>(dim), range.offset, range.size));
    global = parts.empty() ? global.narrow(static_cast<int64_t>(dim), 0, 0)
                           : at::cat(parts, static_cast<int64_t>(dim));
  }
  return global;
}

/// Runs and elements are what brute force finds; each part is bitwise that part of the whole.
TEST(Region, PiecesAreThoseOfTheGlobalTensor) {
  const std::vector<std::vector<int64_t>> shapes{{},      {1},       {7},       {200},     {5, 3},
                                                 {6, 70}, {4, 3, 5}, {2, 0, 3}, {3, 40, 2}};
  const std::vector<int64_t> mesh_shape{2, 2};
  for (const auto& shape : shapes) {
    const auto ndim = static_cast<int64_t>(shape.size());
    std::vector<Placement> choices{Replicate()};
    for (int64_t dim = 0; dim < ndim; ++dim) {
      choices.push_back(Shard(dim));
      choices.push_back(StridedShard(dim, 2));
    }
    const at::Tensor indices = at::arange(c10::multiply_integers(shape), at::kLong).view(shape);
    const Draw draw{3, 4};
    std::map<std::string, at::Tensor> globals;
    for (const auto& [name, distribution] : distributions())
      globals[name] = filled(Region::all(shape), at::kFloat, distribution, draw);
    const at::Tensor wide = filled(Region::all(shape), at::kDouble, Distribution::normal(), draw);
    for (const Placement& a : choices) {
      for (const Placement& b : choices) {
        for (int64_t rank = 0; rank < 4; ++rank) {
          Region region = Region::all(shape);
          region.pieces = local_pieces(shape, mesh_shape, {a, b}, {}, {rank / 2, rank % 2});
          const at::Tensor expected = part_of(indices, region.pieces).contiguous();
          std::vector<int64_t> visited;
          region.for_each_run([&](uint64_t first, int64_t count) {
            EXPECT_GT(count, 0);
            for (int64_t i = 0; i < count; ++i) visited.push_back(static_cast<int64_t>(first) + i);
          });
          ASSERT_EQ(static_cast<int64_t>(visited.size()), region.numel());
          ASSERT_TRUE(std::equal(visited.begin(), visited.end(), expected.const_data_ptr<int64_t>()));
          for (const auto& [name, distribution] : distributions())
            EXPECT_TRUE(same_bits(filled(region, at::kFloat, distribution, draw),
                                  part_of(globals[name], region.pieces)))
                << name << " " << at::IntArrayRef(shape) << " " << a << b;
          EXPECT_TRUE(same_bits(filled(region, at::kDouble, Distribution::normal(), draw),
                                part_of(wide, region.pieces)));
        }
      }
    }
  }
}

/// Of all dtypes: a part that begins and ends anywhere, and memory that is not contiguous.
TEST(Region, AllDtypes) {
  const std::vector<at::ScalarType> floating{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  const std::vector<at::ScalarType> global{at::kByte,   at::kChar,   at::kShort,  at::kInt, at::kLong,
                                           at::kUInt16, at::kUInt32, at::kUInt64, at::kBool};
  auto check = [](const std::string& name, at::ScalarType dtype) {
    const Distribution distribution = distributions().at(name);
    const Draw draw{5, 6};
    const int64_t size = 5000;
    const at::Tensor all = filled(Region::all({size}), dtype, distribution, draw);
    for (const auto& [offset, count] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {63, 2}, {17, 4000}, {64, 64}, {4990, 10}}) {
      Region part = Region::all({size});
      part.pieces[0] = {Range{offset, count}};
      EXPECT_TRUE(same_bits(filled(part, dtype, distribution, draw), all.narrow(0, offset, count)))
          << name << dtype;
    }
    const at::Tensor transposed = at::empty({50, 100}, dtype).t();
    fill(transposed, Region::all(transposed.sizes()), distribution, draw);
    EXPECT_TRUE(same_bits(transposed, all.view({100, 50}))) << name << dtype;
  };
  for (const auto& [name, distribution] : distributions()) {
    for (const at::ScalarType dtype : floating) check(name, dtype);
  }
  for (const at::ScalarType dtype : global) {
    check("bernoulli", dtype);
    check("all integers", dtype);
    if (dtype == at::kBool) continue;
    check("integers", dtype);
    check("geometric", dtype);
  }
  check("normal", at::kComplexFloat);
  check("uniform", at::kComplexDouble);
}

TEST(Region, IndicesBeyond32Bits) {
  // The last columns of a matrix that has more elements than fit into memory.
  Region region = Region::all({int64_t{1} << 33, 100});
  region.pieces[0] = {Range{(int64_t{1} << 33) - 3, 3}};
  region.pieces[1] = {Range{90, 10}};
  const Draw draw{1, 1};
  const at::Tensor actual = filled(region, at::kFloat, Distribution::uniform(), draw);
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 10; ++column) {
      const uint64_t index =
          ((uint64_t{1} << 33) - 3 + static_cast<uint64_t>(row)) * 100 + 90 + static_cast<uint64_t>(column);
      const uint64_t block = index / 64 * 16 + index % 16;
      const auto words =
          philox({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 1, 0}, {1, 0});
      EXPECT_EQ(actual[row][column].item<float>(),
                static_cast<float>(words[index % 64 / 16] >> 8) * 0x1p-24f);
    }
  }
}

// --- distributions

/// The largest distance between the empirical distribution and the true one, times sqrt(n): beyond 1.95 with
/// probability 0.001. For numbers that are not continuous it is smaller.
double kolmogorov(const at::Tensor& values, const std::function<double(double)>& cdf) {
  const at::Tensor sorted = std::get<0>(values.flatten().to(at::kDouble).sort());
  const double* x = sorted.const_data_ptr<double>();
  const auto n = static_cast<double>(sorted.numel());
  double largest = 0;
  for (int64_t i = 0; i < sorted.numel(); ++i) {
    if (i + 1 < sorted.numel() && x[i + 1] == x[i]) continue;  // up to the end of a step
    largest = std::max(largest, std::abs(static_cast<double>(i + 1) / n - cdf(x[i])));
  }
  return largest * std::sqrt(n);
}

constexpr int64_t kMany = 100000;
constexpr double kUnlikely = 1.95;
double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

void expect_moments(const at::Tensor& values, double mean, double variance, const std::string& what) {
  const at::Tensor x = values.to(at::kDouble);
  const double error = std::sqrt(variance / static_cast<double>(x.numel()));
  EXPECT_NEAR(x.mean().item<double>(), mean, 4 * error + 1e-3 * std::abs(mean)) << what;
  EXPECT_NEAR(x.var().item<double>() / variance, 1, 0.06) << what;
}

TEST(Statistics, Distributions) {
  Generator generator(2026);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const std::string what = c10::toString(dtype);
    const bool fine = dtype == at::kFloat || dtype == at::kDouble;
    auto make = [&](const Distribution& d) {
      return filled(Region::all({kMany}), dtype, d, generator.next());
    };
    // Of few bits, values stand for the numbers around them.
    const double limit = fine ? kUnlikely : dtype == at::kHalf ? 3 : 12;

    const at::Tensor u = make(Distribution::uniform(-2, 3));
    EXPECT_LT(kolmogorov(u, [](double x) { return (x + 2) / 5; }), limit) << what;
    EXPECT_GE(u.min().item<double>(), -2);
    EXPECT_LT(u.max().item<double>(), 3);
    expect_moments(u, 0.5, 25.0 / 12, what);

    const at::Tensor z = make(Distribution::normal(1, 2));
    EXPECT_LT(kolmogorov(z, [](double x) { return normal_cdf((x - 1) / 2); }), limit) << what;
    expect_moments(z, 1, 4, what);
    const at::Tensor standard = (z.to(at::kDouble) - 1) / 2;
    EXPECT_NEAR(standard.pow(3).mean().item<double>(), 0, 4 * std::sqrt(15.0 / kMany) + (fine ? 0 : 0.01))
        << what;
    EXPECT_NEAR(standard.pow(4).mean().item<double>(), 3, 4 * std::sqrt(96.0 / kMany) + (fine ? 0 : 0.02))
        << what;

    const at::Tensor e = make(Distribution::exponential(2));
    EXPECT_LT(kolmogorov(e, [](double x) { return 1 - std::exp(-2 * x); }), limit) << what;
    expect_moments(e, 0.5, 0.25, what);

    const at::Tensor l = make(Distribution::log_normal(0.5, 0.25));
    EXPECT_LT(kolmogorov(l, [](double x) { return normal_cdf((std::log(x) - 0.5) / 0.25); }), limit) << what;

    const at::Tensor c = make(Distribution::cauchy(1, 2));
    EXPECT_LT(kolmogorov(c, [](double x) { return 0.5 + std::atan((x - 1) / 2) / M_PI; }), limit) << what;
    if (fine) EXPECT_TRUE(c.isfinite().all().item<bool>());

    const at::Tensor g = make(Distribution::geometric(0.3));
    EXPECT_LT(kolmogorov(g, [](double k) { return 1 - std::pow(0.7, k); }), kUnlikely) << what;
    EXPECT_GE(g.min().item<double>(), 1);

    expect_moments(make(Distribution::bernoulli(0.3)), 0.3, 0.21, what);
  }
  const at::Tensor complex =
      filled(Region::all({kMany}), at::kComplexFloat, Distribution::normal(0, 3), generator.next());
  expect_moments(at::real(complex), 0, 4.5, "real");
  expect_moments(at::imag(complex), 0, 4.5, "imaginary");
}

TEST(Statistics, Integers) {
  Generator generator(7);
  const int64_t sides = 6;
  const at::Tensor dice = randint(0, sides, {kMany}, {}, generator);
  const at::Tensor counts = at::bincount(dice, {}, sides).to(at::kDouble);
  const double expected = static_cast<double>(kMany) / static_cast<double>(sides);
  // Chi-squared of 5 degrees of freedom: beyond 20.5 with probability 0.001.
  EXPECT_LT(((counts - expected).pow(2) / expected).sum().item<double>(), 20.5);
  // A range just above 2^63, where a remainder would favour the small ones.
  const int64_t low = std::numeric_limits<int64_t>::min() / 2;
  const at::Tensor wide = at::empty({kMany}, at::kLong);
  random_(wide, low, std::numeric_limits<int64_t>::max(), generator);
  const double from = static_cast<double>(low), range = 0x1p63 + 0x1p62;
  EXPECT_LT(kolmogorov(wide, [&](double x) { return (x - from) / range; }), kUnlikely);
  for (const auto& [dtype, most] : std::vector<std::pair<at::ScalarType, double>>{{at::kBool, 1},
                                                                                  {at::kByte, 255},
                                                                                  {at::kChar, 127},
                                                                                  {at::kShort, 32767},
                                                                                  {at::kFloat, 0x1p24},
                                                                                  {at::kHalf, 2048},
                                                                                  {at::kBFloat16, 256}}) {
    const at::Tensor values = at::empty({kMany}, dtype);
    random_(values, generator);
    EXPECT_EQ(values.min().to(at::kDouble).item<double>() > 0.001 * most, false) << dtype;
    EXPECT_GE(values.max().to(at::kDouble).item<double>(), 0.999 * most) << dtype;
    EXPECT_NEAR(values.to(at::kDouble).mean().item<double>() / most, 0.5, 0.01) << dtype;
  }
}

double correlation(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.flatten().to(at::kDouble), y = b.flatten().to(at::kDouble);
  return ((x - x.mean()) * (y - y.mean())).mean().item<double>() / (x.std() * y.std()).item<double>();
}

TEST(Statistics, NoCorrelations) {
  const double limit = 4 / std::sqrt(static_cast<double>(kMany) / 2);
  Generator generator(11);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const Distribution& distribution : {Distribution::uniform(), Distribution::normal()}) {
      auto make = [&](Generator from) {
        return filled(Region::all({kMany}), dtype, distribution, from.next());
      };
      const at::Tensor first = make(generator), second = make(generator);
      EXPECT_LT(std::abs(correlation(first, second)), limit) << "consecutive calls";
      EXPECT_LT(std::abs(correlation(first, make(Generator(12)))), limit) << "consecutive seeds";
      EXPECT_LT(std::abs(correlation(make(generator.fork(0)), make(generator.fork(1)))), limit) << "streams";
      EXPECT_LT(std::abs(correlation(first, make(generator.fork(0)))), limit) << "a stream and its origin";
      const auto halves = first.chunk(2);
      EXPECT_LT(std::abs(correlation(halves[0], halves[1])), limit) << "shards";
      for (const int64_t lag : {1, 2, 4, 16, 32, 64, 1024})
        EXPECT_LT(std::abs(correlation(first.narrow(0, 0, kMany - lag), first.narrow(0, lag, kMany - lag))),
                  limit)
            << lag;
      // Neither are their sizes.
      EXPECT_LT(
          std::abs(correlation(first.narrow(0, 0, kMany - 16).abs(), first.narrow(0, 16, kMany - 16).abs())),
          limit);
    }
  }
}

TEST(Statistics, Permutations) {
  // Each of the 24 permutations of 4 is as likely as any other.
  Generator generator(3);
  std::map<std::vector<int64_t>, int64_t> counts;
  constexpr int64_t kTrials = 12000;
  for (int64_t i = 0; i < kTrials; ++i) {
    const at::Tensor p = randperm(4, {}, generator);
    ++counts[{p.const_data_ptr<int64_t>(), p.const_data_ptr<int64_t>() + 4}];
  }
  EXPECT_EQ(counts.size(), 24u);
  double chi = 0;
  for (const auto& [permutation, count] : counts)
    chi += std::pow(static_cast<double>(count) - kTrials / 24.0, 2) / (kTrials / 24.0);
  EXPECT_LT(chi, 49.7);  // 23 degrees of freedom: beyond with probability 0.001
  for (const int64_t n : {0, 1, 2, 1000, 65536, 65537, 300000}) {
    const at::Tensor p = randperm(n, {}, generator);
    EXPECT_TRUE(at::equal(std::get<0>(p.sort()), at::arange(n))) << n;
    if (n < 1000) continue;
    EXPECT_LT(std::abs(correlation(p, at::arange(n))), 4 / std::sqrt(static_cast<double>(n))) << n;
    EXPECT_LT(std::abs(correlation(p.narrow(0, 0, n - 1), p.narrow(0, 1, n - 1))),
              4 / std::sqrt(static_cast<double>(n)))
        << n;
    // On average one number stays where it is.
    EXPECT_LT((p == at::arange(n)).sum().item<int64_t>(), 8) << n;
  }
}

TEST(Statistics, Multinomial) {
  Generator generator(5);
  const at::Tensor weights = at::tensor({1.0, 0.0, 3.0, 6.0}, at::kDouble);
  for (const bool replacement : {true, false}) {
    const int64_t count = replacement ? 1000 : 1;
    at::Tensor counts = at::zeros({4}, at::kDouble);
    for (int64_t i = 0; i < (replacement ? 40 : 10000); ++i)
      counts += at::bincount(random::multinomial(weights, count, replacement, generator), {}, 4);
    const at::Tensor share = counts / counts.sum();
    EXPECT_TRUE(at::allclose(share, weights / 10, 0, 0.02)) << share;
    EXPECT_EQ(counts[1].item<double>(), 0);
  }
  // Without replacement: all different, and which is second depends on which is first as it should.
  const at::Tensor rows = at::tensor({1.0, 1.0, 2.0}, at::kDouble).expand({20000, 3});
  const at::Tensor pairs = random::multinomial(rows, 2, false, generator);
  EXPECT_FALSE((pairs.select(1, 0) == pairs.select(1, 1)).any().item<bool>());
  const at::Tensor after_last = pairs.select(1, 1).index({pairs.select(1, 0) == 2});
  EXPECT_NEAR((after_last == 0).to(at::kDouble).mean().item<double>(), 0.5, 0.03);
}

// --- generators and plain functions

TEST(Generator, States) {
  Generator generator(5);
  EXPECT_EQ(generator.state(), (State{5, 0, 0}));
  const at::Tensor first = randn({10}, {}, generator);
  EXPECT_EQ(generator.state(), (State{5, 0, 1}));
  const State state = generator.state();
  const at::Tensor second = randn({10}, {}, generator);
  EXPECT_FALSE(at::equal(first, second));
  generator.set_state(State::parse(state.str()));
  EXPECT_TRUE(at::equal(randn({10}, {}, generator), second));
  EXPECT_EQ(state.str(), "seed 5 stream 0 call 1");
  const State large{~uint64_t{0}, ~uint64_t{0} - 1, ~uint64_t{0} - 2};
  EXPECT_EQ(State::parse(large.str()), large);
  for (const char* text : {"", "seed", "seed 5", "seed x stream 0 call 1", "seed 5 stream 0 call 1 more",
                           "seed 5 stream 0 call 1nothing more", "seed -1 stream 0 call 0"})
    expect_error<c10::ValueError>([&] { State::parse(text); }, {"state of a random generator"});
  // A copy is the same generator; a fork is another one, and the same for the same id.
  Generator copy = generator;
  EXPECT_TRUE(copy == generator);
  copy.next();
  EXPECT_EQ(copy.state(), generator.state());
  EXPECT_EQ(generator.fork(3).state(), Generator(5).fork(3).state());
  std::set<uint64_t> streams{0};
  for (uint64_t id = 0; id < 1000; ++id) {
    streams.insert(generator.fork(id).state().stream);
    streams.insert(generator.fork(0).fork(id).state().stream);
  }
  EXPECT_EQ(streams.size(), 2001u);
}

TEST(Generator, OfAThreadWithoutRanks) {
  manual_seed(5);
  const at::Tensor expected = randn({3});
  const Snapshot snapshot = get_state();
  EXPECT_EQ(snapshot.state, (State{5, 0, 1}));
  at::Tensor of_other;
  std::thread([&] {
    manual_seed(5);
    of_other = randn({3});
    rand({2});
  }).join();
  EXPECT_TRUE(at::equal(of_other, expected));
  EXPECT_EQ(get_state(), snapshot) << "another thread is another rank";
  const at::Tensor next = randn({3});
  {
    const ReplayScope again(snapshot);
    EXPECT_TRUE(at::equal(randn({3}), next));
    randn({3});
  }
  EXPECT_EQ(get_state().state.call, 2u);
  {
    const GeneratorScope scope(Generator(9));
    EXPECT_TRUE(at::equal(randn({3}), randn({3}, {}, Generator(9))));
  }
  EXPECT_EQ(get_state().state.call, 2u);
  EXPECT_EQ(Snapshot::parse(get_state().str()), get_state());
  set_state(snapshot);
  EXPECT_TRUE(at::equal(randn({3}), next));
}

/// What libtorch draws and what we draw do not disturb each other, but for where an unseeded one begins.
TEST(Generator, BesideLibtorch) {
  at::manual_seed(1);
  const at::Tensor plain = at::randn({5});
  std::thread([] { EXPECT_EQ(get_state().state.seed, 1u); }).join();
  manual_seed(2);
  const at::Tensor ours = randn({5});
  at::manual_seed(1);
  manual_seed(2);
  randn({3});
  EXPECT_TRUE(at::equal(at::randn({5}), plain));
  manual_seed(2);
  at::randn({100});
  EXPECT_TRUE(at::equal(randn({5}), ours));
  // One for libtorch's functions that is this rank's own.
  manual_seed(3);
  const at::Tensor drawn = at::randn({5}, torch_generator());
  EXPECT_FALSE(at::equal(at::randn({5}, torch_generator()), drawn));
  manual_seed(3);
  EXPECT_TRUE(at::equal(at::randn({5}, torch_generator()), drawn));
  // A generator that a user gives: one number of it for each call.
  const at::Generator given = at::make_generator<at::CPUGeneratorImpl>(4),
                      same = at::make_generator<at::CPUGeneratorImpl>(4);
  const Draw first = draw_from(given);
  EXPECT_EQ(first.key, draw_from(same).key);
  EXPECT_NE(first.key, draw_from(given).key);
}

TEST(Plain, AsLibtorchHasThem) {
  manual_seed(1);
  EXPECT_EQ(rand({2, 3}).scalar_type(), at::kFloat);
  EXPECT_EQ(randn({2, 3}, at::kDouble).scalar_type(), at::kDouble);
  EXPECT_TRUE(randn({2}, at::TensorOptions().requires_grad(true)).requires_grad());
  EXPECT_EQ(randint(0, 5, {4}).scalar_type(), at::kLong);
  EXPECT_EQ(randint(0, 5, {4}, at::kFloat).scalar_type(), at::kFloat);
  EXPECT_EQ(randperm(5, at::kInt).scalar_type(), at::kInt);
  EXPECT_EQ(rand({0, 3}).numel(), 0);
  EXPECT_EQ(rand({}).dim(), 0);
  const at::Tensor x = at::ones({1000}).requires_grad_();
  const at::Tensor y = random::dropout(x, 0.25);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.detach()));
  EXPECT_TRUE(at::logical_or(y == 0, (y - 4.0 / 3).abs() < 1e-6).all().item<bool>());
  EXPECT_NEAR((y == 0).to(at::kFloat).mean().item<double>(), 0.25, 0.06);
  EXPECT_TRUE(at::equal(random::dropout(x, 0.5, false), x));
  EXPECT_EQ(random::dropout(x, 1).abs().sum().item<double>(), 0);
  const at::Tensor p = at::linspace(0, 1, 1001);
  const at::Tensor b = random::bernoulli(p);
  EXPECT_EQ(b[0].item<float>(), 0);
  EXPECT_EQ(b[1000].item<float>(), 1);
  EXPECT_GT(correlation(b, p), 0.4);
  EXPECT_EQ(bernoulli_(at::empty({100}), 1).sum().item<float>(), 100);
  EXPECT_EQ(bernoulli_(at::empty({100}), 0).sum().item<float>(), 0);
  EXPECT_EQ(uniform_(at::empty({100}), 2, 2).sum().item<float>(), 200);
  EXPECT_EQ(normal_(at::empty({100}), 2, 0).sum().item<float>(), 200);
  // Never the upper end, not even when rounded to few bits.
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat})
    EXPECT_LT(uniform_(at::empty({100000}, dtype), -1000, -999).max().item<double>(), -999) << dtype;
  const at::Tensor before = at::zeros({3});
  const auto version = before._version();
  normal_(before);
  EXPECT_GT(before._version(), version);
}

TEST(Plain, ErrorsAreForPeople) {
  const at::Tensor x = at::empty({3}), global = at::empty({3}, at::kInt);
  expect_error<c10::Error>([&] { uniform_(x, 1, 0); }, {"uniform", "ascending"});
  expect_error<c10::Error>([&] { uniform_(at::empty({3}, at::kHalf), 0, 1e6); }, {"uniform", "Half"});
  expect_error<c10::Error>([&] { normal_(x, 0, -1); }, {"normal", "negative"});
  expect_error<c10::Error>([&] { log_normal_(x, 0, 0); }, {"log_normal", "positive"});
  expect_error<c10::Error>([&] { exponential_(x, 0); }, {"exponential", "positive"});
  expect_error<c10::Error>([&] { cauchy_(x, 0, 0); }, {"cauchy", "positive"});
  expect_error<c10::Error>([&] { geometric_(x, 1); }, {"geometric", "between 0 and 1"});
  expect_error<c10::Error>([&] { bernoulli_(x, 1.5); }, {"bernoulli", "from 0 to 1"});
  expect_error<c10::Error>([&] { random_(x, 5, 5); }, {"random", "5"});
  expect_error<c10::Error>([&] { random_(at::empty({3}, at::kByte), 0, 300); }, {"random", "299", "Byte"});
  expect_error<c10::NotImplementedError>([&] { normal_(global); }, {"normal", "Int"});
  expect_error<c10::Error>([&] { cauchy_(at::empty({3}, at::kComplexFloat)); }, {"cauchy", "ComplexFloat"});
  expect_error<c10::Error>([&] { normal_(at::empty({3}).requires_grad_()); }, {"NoGradGuard"});
  expect_error<c10::Error>([&] { random::bernoulli(at::full({3}, 2.0)); }, {"from 0 to 1"});
  expect_error<c10::Error>(
      [&] {
        random::multinomial(at::tensor({-1.0, 2.0}), 1);
      },
      {"multinomial", "negative"});
  expect_error<c10::Error>([&] { random::multinomial(at::zeros({2}), 1); }, {"multinomial", "positive"});
  expect_error<c10::Error>([&] { random::multinomial(at::ones({2}), 3); }, {"different", "replacement"});
  expect_error<c10::Error>([&] { random::multinomial(at::tensor({1.0, 0.0}), 2); }, {"not zero"});
  expect_error<c10::Error>([&] { randperm(-1); }, {"randperm"});
  expect_error<c10::Error>([&] { random::dropout(x, 2); }, {"dropout"});
}

}  // namespace
}  // namespace tessera::random
