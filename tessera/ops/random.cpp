#include <tessera/error.h>
#include <tessera/ops/family.h>
#include <tessera/ops/plain_gradients.h>
#include <tessera/random/generator.h>
#include <tessera/random/sample.h>

#include <algorithm>
#include <memory>

#include <ATen/ATen.h>
#include <torch/library.h>

/// Random operators: each rank makes the numbers of the elements that it holds, which depend on where these
/// lie in the global tensor and not on the rank (tessera/random). Nothing is communicated, and each operator
/// makes one call of the generator, whatever it is about.
namespace tessera::ops {

namespace {

using random::Distribution;
using random::Draw;
using random::Region;

/// The arguments of a call, by name, as random operators have them.
class Arguments : public NamedArguments {
 public:
  using NamedArguments::NamedArguments;

  double number(const char* name) const { return (*this)[name].toScalar().toDouble(); }
  std::optional<at::Generator> generator() const { return optional<at::Generator>("generator"); }
  /// With the dtype, the device and so on that the call asks for, if it does.
  at::Tensor empty_like(const at::Tensor& tensor) const {
    return at::empty_like(tensor, optional<at::ScalarType>("dtype"), optional<at::Layout>("layout"),
                          optional<at::Device>("device"), optional<bool>("pin_memory"),
                          optional<at::MemoryFormat>("memory_format"));
  }
  template <class T>
  std::optional<T> optional(const char* name) const {
    return has(name) ? std::optional((*this)[name].to<T>()) : std::nullopt;
  }
  bool writes(size_t position) const {
    const auto* alias = schema().arguments()[position].alias_info();
    return alias && alias->isWrite();
  }
};

/// Makes the results of a call on this rank.
using Make = std::function<Stack(const Arguments& arguments, const Region& region, const Draw& draw)>;

/// Each rank makes what it holds of the first result; `draws` says if there is anything to draw.
Localize by_region(Make make, std::function<bool(const Arguments&)> draws = {}) {
  return [make = std::move(make), draws = std::move(draws)](const ChosenSpecs& chosen) {
    LocalCall local;
    local.compute = [make, draws, region = Region(chosen.outputs[0]), mesh = chosen.outputs[0].mesh()](
                        const c10::OperatorHandle& op, Stack stack) {
      const Arguments arguments(op, stack);
      // Nothing is drawn for tensors without memory, as on one device.
      const auto device = arguments.optional<at::Device>("device");
      const bool is_on_meta =
          device ? device->is_meta() : stack[0].isTensor() && stack[0].toTensor().is_meta();
      const bool has_any = !is_on_meta && (!draws || draws(arguments));
      return make(arguments, region, has_any ? random::next_draw(mesh, arguments.generator()) : Draw());
    };
    local.writes = true;
    return local;
  };
}

/// With its numbers drawn by each rank for its shard.
/// `refused`: arguments whose values may be refused, as a probability above 1.
Rule drawn(Rule rule, Localize localize, Names refused = {}) {
  rule.local = {"drawn by each rank for its shard", [localize](const OpCall&) { return localize; }};
  rule.for_random = true;
  rule.checks_values_of = std::move(refused);
  return rule;
}

// --- independent numbers

using Choose = Distribution (*)(const Arguments&);

/// What was given is filled, or a new tensor like it. What it was before does not matter; of a partial one,
/// the global value is what was drawn.
Rule fills(Choose distribution) {
  return drawn(LikeInput{.size = LikeInput::Size::same},
               by_region([distribution](const Arguments& a, const Region& region, const Draw& draw) {
                 const bool is_out = a.has("out");
                 const at::Tensor& given = is_out ? a.tensor("out") : a.tensor("self");
                 const at::Tensor out = is_out || a.writes(0) ? given : a.empty_like(given);
                 random::fill(out, region, distribution(a), draw);
                 return Stack{out};
               }));
}

Distribution uniform(const Arguments& a) {
  return a.has("from") ? Distribution::uniform(a.number("from"), a.number("to")) : Distribution::uniform();
}
Distribution normal(const Arguments& a) {
  return a.has("mean") ? Distribution::normal(a.number("mean"), a.number("std")) : Distribution::normal();
}
Distribution log_normal(const Arguments& a) {
  return Distribution::log_normal(a.number("mean"), a.number("std"));
}
Distribution exponential(const Arguments& a) { return Distribution::exponential(a.number("lambd")); }
Distribution cauchy(const Arguments& a) {
  return Distribution::cauchy(a.number("median"), a.number("sigma"));
}
Distribution geometric(const Arguments& a) { return Distribution::geometric(a.number("p")); }
Distribution bernoulli(const Arguments& a) { return Distribution::bernoulli(a.number("p")); }
/// random_(), random_(to), random_(from, to?), randint(high), randint(low, high)
Distribution integers(const Arguments& a) {
  if (a.has("high")) return Distribution::integers(a.has("low") ? a["low"].toInt() : 0, a["high"].toInt());
  if (!a.has("from") && !a.has("to")) return Distribution::integers();
  return Distribution::integers(a.has("from") ? a["from"].toInt() : 0,
                                a.has("to") ? std::optional(a["to"].toInt()) : std::nullopt);
}

/// The bound is a tensor.
Stack randint_below(const c10::OperatorHandle& op, Stack stack) {
  const Arguments a(op, stack);
  return {at::randint_like(a.tensor("self"), a.tensor("high").item<int64_t>(), a.generator(),
                           a.optional<at::ScalarType>("dtype"), a.optional<at::Layout>("layout"),
                           a.optional<at::Device>("device"), a.optional<bool>("pin_memory"),
                           a.optional<at::MemoryFormat>("memory_format"))};
}

/// Of one dim, whose elements are not independent of each other.
std::optional<Strategies> permutation(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() != 1 || spec.shape()[0] != call.integer("n")) return std::nullopt;
  return propose(LikeInput{}, call);
}

Stack permute(const Arguments& a, const Region& region, const Draw& draw) {
  random::permutation_into(a.tensor("out"), region, draw);
  return {a.tensor("out")};
}

// --- functions of tensors

/// bernoulli(p), bernoulli(self, p) and in place.
std::optional<Strategies> like_self(const OpCall& call) {
  auto strategies = propose(Pointwise{}, call);
  if (!strategies || c10::IntArrayRef(strategies->results[0].shape) != call.tensors[0].shape())
    return std::nullopt;
  return strategies;
}

Stack bernoulli_of(const Arguments& a, const Region& region, const Draw& draw) {
  const at::Tensor& self = a.tensor("self");
  const at::Tensor out = a.writes(0) ? self : at::empty_like(self);
  random::bernoulli_into(out, a.has("p") ? a.tensor("p") : self, region, draw);
  return {out};
}

/// In memory of its own: contiguous, whatever the inputs are.
std::optional<Strategies> contiguous_pointwise(const OpCall& call) {
  auto strategies = propose(Pointwise{}, call);
  if (strategies) strategies->results[0].strides.clear();
  return strategies;
}

Stack normal_of(const Arguments& a, const Region& region, const Draw& draw) {
  auto tensor = [&](const char* name) {
    return a[name].isTensor() ? a.tensor(name) : at::scalar_tensor(a[name].toScalar(), at::kDouble);
  };
  const at::Tensor mean = tensor("mean"), std = tensor("std");
  const at::Tensor& first = a["mean"].isTensor() ? mean : std;
  return {random::normal_of(mean, std, first.options(), region, draw)};
}

/// The mask is replicated where the input is a partial sum.
std::optional<Strategies> output_and_mask(const OpCall& call) {
  auto strategies = propose(Pointwise{.linear = {{"input"}}}, call);
  if (!strategies) return std::nullopt;
  for (Strategy& option : strategies->options) {
    if (option.outputs[1].is_partial()) option.outputs[1] = Replicate();
  }
  return strategies;
}

bool drops(const Arguments& a) { return !a.has("train") || a["train"].toBool(); }

Stack dropout(const Arguments& a, const Region& region, const Draw& draw) {
  const at::Tensor& input = a.tensor("input");
  if (!drops(a)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto [output, kept] = random::dropout_of(input, a.number("p"), region, draw);
  return {std::move(output), std::move(kept)};
}

bool trains(const Arguments& a) { return a["training"].toBool(); }

Stack rrelu(const Arguments& a, const Region& region, const Draw& draw) {
  const at::Tensor &self = a.tensor("self"), &noise = a.tensor("noise");
  const double lower = a.number("lower"), upper = a.number("upper");
  const at::Tensor out = trains(a) ? random::rrelu_of(self, noise, lower, upper, region, draw)
                                   : at::leaky_relu(self, (lower + upper) / 2);
  if (!a.writes(0)) return {out};
  self.copy_(out);
  return {self};
}

/// Each row is drawn from by one rank.
std::optional<Strategies> sampled_rows(const OpCall& call) {
  const Spec& weights = call.tensors[0];
  if (weights.ndim() != 1 && weights.ndim() != 2) return std::nullopt;
  if (call.integer("num_samples") <= 0) return std::nullopt;
  auto strategies = propose(UnshardedDims{.last = {-1}}, call);
  if (strategies) strategies->results[0].shape.back() = call.integer("num_samples");
  return strategies;
}

Stack multinomial(const Arguments& a, const Region& region, const Draw& draw) {
  return {random::multinomial_of(a.tensor("self"), a["num_samples"].toInt(), a["replacement"].toBool(),
                                 region, draw)};
}

}  // namespace

Table random_rules() {
  Rule below = Decomposition{{"item", "randint_like"}, randint_below};
  below.for_random = true;
  return tried({
      {{"uniform", "rand_like", "rand_like.generator", "rand.out", "rand.generator_out"}, fills(uniform)},
      {{"normal_", "normal_functional", "randn_like", "randn_like.generator", "randn.out",
        "randn.generator_out", "normal.float_float_out"},
       fills(normal)},
      {{"log_normal"}, fills(log_normal)},
      {{"exponential"}, fills(exponential)},
      {{"cauchy"}, fills(cauchy)},
      {{"geometric"}, fills(geometric)},
      {{"bernoulli_.float", "bernoulli.p"}, fills(bernoulli)},
      {{"random", "random.from", "random.to", "randint_like", "randint_like.generator",
        "randint_like.low_dtype", "randint_like.low_generator_dtype", "randint.out", "randint.generator_out",
        "randint.low_out", "randint.low_generator_out"},
       fills(integers)},
      {{"randint_like.Tensor", "randint_like.Tensor_generator"}, below},
      {{"randperm.out", "randperm.generator_out"},
       drawn({"placed like the input, P as R",
              permutation,
              {"n", "memory_format", "size", "stride"},
              "`n` has to be the size of the tensor that is given"},
             by_region(permute))},
      {{"bernoulli"},
       drawn({"pointwise, of the shape of `self`", like_self, {}, "`p` must not broadcast `self`"},
             by_region(bernoulli_of), {"self"})},
      {{"bernoulli.Tensor"},
       drawn({"pointwise, of the shape of `self`", like_self, {}, "`p` must not broadcast `self`"},
             by_region(bernoulli_of), {"p"})},
      {{"normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor"},
       drawn({"pointwise, contiguous", contiguous_pointwise, {}, "results have no strides of inputs"},
             by_region(normal_of), {"std"})},
      {{"native_dropout"},
       drawn({"pointwise, linear in `input`", output_and_mask, {}, "the mask is never partial"},
             by_region(dropout, drops))},
      {{"rrelu_with_noise"}, drawn(Pointwise{}, by_region(rrelu, trains))},
      {{"multinomial"},
       drawn({"dim -1 unsharded, others alike", sampled_rows, {"num_samples"}, "`num_samples` is a size"},
             by_region(multinomial), {"self"})},
  });
}

}  // namespace tessera::ops

// --- autograd and composites

namespace tessera {

namespace {

/// In one operator, whose mask is replicated also where the input is a partial sum.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TESSERA_CHECK(p >= 0 && p <= 1, "dropout: p must be from 0 to 1, got ", p, ".");
  if (!train || p == 0 || input.numel() == 0) return input;
  TESSERA_CHECK_AS(c10::NotImplementedError, !input.is_complex() || p == 1, "dropout: not implemented for ",
                   input.scalar_type(), ".");
  return std::get<0>(at::native_dropout(input, p, true));
}

void register_random_composites(torch::Library& library) { library.impl("dropout", dropout); }

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_random_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  register_random_composites(library);
  distribute_gradients(library,
                       {"normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor", "poisson"});
}

}  // namespace

}  // namespace tessera
