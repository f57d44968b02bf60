// What a random number costs on one core, beside libtorch's own, and how that depends on which part of a
// tensor a rank holds.

#include <tessera/random/fill.h>
#include <tessera/random/random.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

namespace {

using namespace tessera;
using random::Distribution;
using random::Region;

/// Nanoseconds per element: the least of several tries.
double cost(int64_t elements, const std::function<void()>& call) {
  double best = 1e30;
  for (int i = 0; i < 9; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    best = std::min(
        best, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count());
  }
  return best / static_cast<double>(elements);
}

struct Function {
  const char* name;
  std::vector<at::ScalarType> dtypes;
  std::function<void(at::Tensor&)> libtorch;
  Distribution distribution;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What random numbers cost on one core.");
  int64_t elements = 1 << 20;
  app.add_option("--elements", elements, "How many at once");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);

  const std::vector<at::ScalarType> wide{at::kFloat, at::kDouble, at::kBFloat16}, global{at::kLong};
  const std::vector<Function> functions{
      {"rand, uniform_", wide, [](at::Tensor& x) { x.uniform_(); }, Distribution::uniform()},
      {"randn, normal_", wide, [](at::Tensor& x) { x.normal_(); }, Distribution::normal()},
      {"bernoulli_", wide, [](at::Tensor& x) { x.bernoulli_(0.3); }, Distribution::bernoulli(0.3)},
      {"exponential_", wide, [](at::Tensor& x) { x.exponential_(); }, Distribution::exponential()},
      {"log_normal_", wide, [](at::Tensor& x) { x.log_normal_(); }, Distribution::log_normal()},
      {"cauchy_", wide, [](at::Tensor& x) { x.cauchy_(); }, Distribution::cauchy()},
      {"geometric_", global, [](at::Tensor& x) { x.geometric_(0.3); }, Distribution::geometric(0.3)},
      {"randint, random_", global, [](at::Tensor& x) { x.random_(0, 1000); },
       Distribution::integers(0, 1000)},
  };
  std::printf("Random numbers, %lld at once, on one core: ns per element\n\n",
              static_cast<long long>(elements));
  std::printf("%-20s %-10s %10s %10s %22s\n", "function", "dtype", "libtorch", "tessera",
              "libtorch / tessera");
  for (const Function& function : functions) {
    for (const at::ScalarType dtype : function.dtypes) {
      at::Tensor x = at::empty({elements}, dtype);
      const double theirs = cost(elements, [&] { function.libtorch(x); });
      const Region all = Region::all(x.sizes());
      uint64_t call = 0;
      const double ours = cost(elements, [&] { random::fill(x, all, function.distribution, {1, call++}); });
      std::printf("%-20s %-10s %10.2f %10.2f %22.2f\n", function.name, c10::toString(dtype), theirs, ours,
                  theirs / ours);
    }
  }

  // A rank's part of a matrix whose columns are sharded: runs of so many consecutive elements.
  std::printf("\n%-20s %10s\n", "randn, in runs of", "tessera");
  for (const int64_t run : {1, 2, 4, 8, 16, 32, 64, 128, 512}) {
    const int64_t rows = elements / run;
    Region part = Region::all({rows, 4 * run});
    part.pieces[1] = {Range{run, run}};
    const at::Tensor x = at::empty({rows, run});
    const double ours = cost(rows * run, [&] { random::fill(x, part, Distribution::normal(), {1, 2}); });
    std::printf("%-20lld %10.2f\n", static_cast<long long>(run), ours);
  }
  return 0;
}
