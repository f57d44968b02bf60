#include <tessera/error.h>
#include <tessera/random/random.h>
#include <tessera/random/sample.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace tessera::random {

namespace {

at::Tensor made(c10::IntArrayRef size, const at::TensorOptions& options, const Distribution& distribution,
                Generator& generator) {
  at::Tensor result = filled(Region::all(size), options.requires_grad(false), distribution, generator.next());
  return result.set_requires_grad(options.requires_grad());
}

void check_writable(const at::Tensor& self, const char* name) {
  TESSERA_CHECK(
      !at::GradMode::is_enabled() || !self.requires_grad(), name,
      ": the tensor requires a gradient, so it cannot be written in place; keep an at::NoGradGuard alive "
      "around the call.");
}

const at::Tensor& written(const at::Tensor& self, const Distribution& distribution, Generator& generator) {
  check_writable(self, distribution.name());
  fill(self, Region::all(self.sizes()), distribution, generator.next());
  return self;
}

}  // namespace

at::Tensor rand(c10::IntArrayRef size, const at::TensorOptions& options, Generator generator) {
  return made(size, options, Distribution::uniform(), generator);
}
at::Tensor randn(c10::IntArrayRef size, const at::TensorOptions& options, Generator generator) {
  return made(size, options, Distribution::normal(), generator);
}
at::Tensor randint(int64_t low, int64_t high, c10::IntArrayRef size, const at::TensorOptions& options,
                   Generator generator) {
  return made(size, options.has_dtype() ? options : options.dtype(at::kLong),
              Distribution::integers(low, high), generator);
}
at::Tensor randperm(int64_t n, const at::TensorOptions& options, Generator generator) {
  TESSERA_CHECK(n >= 0, "randperm: there is no permutation of ", n, " numbers.");
  at::Tensor result = at::empty({n}, options.has_dtype() ? options : options.dtype(at::kLong));
  permutation_into(result, Region::all(result.sizes()), generator.next());
  return result;
}

const at::Tensor& uniform_(const at::Tensor& self, double from, double to, Generator generator) {
  return written(self, Distribution::uniform(from, to), generator);
}
const at::Tensor& normal_(const at::Tensor& self, double mean, double std, Generator generator) {
  return written(self, Distribution::normal(mean, std), generator);
}
const at::Tensor& log_normal_(const at::Tensor& self, double mean, double std, Generator generator) {
  return written(self, Distribution::log_normal(mean, std), generator);
}
const at::Tensor& exponential_(const at::Tensor& self, double lambd, Generator generator) {
  return written(self, Distribution::exponential(lambd), generator);
}
const at::Tensor& cauchy_(const at::Tensor& self, double median, double sigma, Generator generator) {
  return written(self, Distribution::cauchy(median, sigma), generator);
}
const at::Tensor& geometric_(const at::Tensor& self, double p, Generator generator) {
  return written(self, Distribution::geometric(p), generator);
}
const at::Tensor& bernoulli_(const at::Tensor& self, double p, Generator generator) {
  return written(self, Distribution::bernoulli(p), generator);
}
const at::Tensor& bernoulli_(const at::Tensor& self, const at::Tensor& p, Generator generator) {
  check_writable(self, "bernoulli");
  const at::NoGradGuard no_grad;
  bernoulli_into(self, p, Region::all(self.sizes()), generator.next());
  return self;
}
const at::Tensor& random_(const at::Tensor& self, Generator generator) {
  return written(self, Distribution::integers(), generator);
}
const at::Tensor& random_(const at::Tensor& self, int64_t from, std::optional<int64_t> to,
                          Generator generator) {
  return written(self, Distribution::integers(from, to), generator);
}

at::Tensor bernoulli(const at::Tensor& p, Generator generator) {
  const at::NoGradGuard no_grad;
  at::Tensor result = at::empty_like(p);
  bernoulli_into(result, p, Region::all(p.sizes()), generator.next());
  return result;
}

at::Tensor multinomial(const at::Tensor& weights, int64_t count, bool replacement, Generator generator) {
  const at::NoGradGuard no_grad;
  c10::DimVector shape(weights.sizes());
  TESSERA_CHECK(!shape.empty(), "multinomial: weights have 1 or 2 dims, not 0.");
  shape.back() = count;
  return multinomial_of(weights, count, replacement, Region::all(shape), generator.next());
}

at::Tensor dropout(const at::Tensor& input, double p, bool train, Generator generator) {
  TESSERA_CHECK(p >= 0 && p <= 1, "dropout: p must be from 0 to 1, got ", p, ".");
  if (!train || p == 0 || input.numel() == 0) return input;
  return std::get<0>(dropout_of(input, p, Region::all(input.sizes()), generator.next()));
}

}  // namespace tessera::random
