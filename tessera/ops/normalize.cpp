#include <tessera/ops/family.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

#include <ATen/ATen.h>

namespace tessera::ops {

namespace {

/// What values are computed in.
at::Tensor wide(const at::Tensor& x) {
  const bool narrow = x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
  return narrow ? x.to(at::kFloat) : x;
}

/// Along one dim: where that is cut, by small reductions instead of a gather.
Rule softmax_rule(const char* text, const Function& by_parts) {
  Rule rule{text,
            [by_parts](const OpCall& call) -> std::optional<Strategies> {
              const Spec& spec = call.tensors[0];
              if (call.tensors.size() > 1 && call.tensors[1].shape() != spec.shape()) return std::nullopt;
              if (spec.ndim() == 0) return unsharded_dims(call, {}, {{spec.shape().vec()}});
              const int64_t dim = wrapped(call.integer("dim"), spec.ndim());
              if (std::any_of(call.tensors.begin(), call.tensors.end(),
                              [&](const Spec& s) { return is_sharded_on(s, {dim}); }) &&
                  spec.numel() > 0) {
                Strategies strategies;
                strategies.decompose = by_parts;
                return strategies;
              }
              return unsharded_dims(call, {dim}, {{spec.shape().vec()}});
            },
            {"dim"}};
  rule.can_be_tried = true;
  return rule;
}

Stack softmax(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor x = arguments[0].toTensor(), values = wide(x);
  const int64_t dim = arguments[1].toInt();
  const at::Tensor powers = at::exp(at::sub(values, at::amax(values, dim, /*keepdim=*/true)));
  const at::Tensor result = at::div(powers, at::sum(powers, dim, /*keepdim=*/true));
  return {arguments[2].toBool() ? result : result.to(x.scalar_type())};
}

Stack log_softmax(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor x = arguments[0].toTensor(), values = wide(x);
  const int64_t dim = arguments[1].toInt();
  const at::Tensor shifted = at::sub(values, at::amax(values, dim, /*keepdim=*/true));
  const at::Tensor result = at::sub(shifted, at::log(at::sum(at::exp(shifted), dim, /*keepdim=*/true)));
  return {arguments[2].toBool() ? result : result.to(x.scalar_type())};
}

Stack softmax_backward(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor gradient = wide(arguments[0].toTensor()), output = wide(arguments[1].toTensor());
  const at::Tensor product = at::mul(gradient, output);
  const at::Tensor sum = at::sum(product, arguments[2].toInt(), /*keepdim=*/true);
  return {at::sub(product, at::mul(output, sum)).to(arguments[3].toScalarType())};
}

Stack log_softmax_backward(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor gradient = wide(arguments[0].toTensor()), output = wide(arguments[1].toTensor());
  const at::Tensor sum = at::sum(gradient, arguments[2].toInt(), /*keepdim=*/true);
  return {at::sub(gradient, at::mul(at::exp(output), sum)).to(arguments[3].toScalarType())};
}

/// Letters of tensors given by name; those that were left out are skipped.
class Named {
 public:
  explicit Named(const OpCall& call) : call_(call), letters_(call.tensors.size()) {}
  void set(std::string_view name, Letters letters) {
    if (const auto number = call_.tensor(name)) letters_[*number] = std::move(letters);
  }
  std::vector<Letters> take() { return std::move(letters_); }

 private:
  const OpCall& call_;
  std::vector<Letters> letters_;
};

Letters filled(size_t count, char letter) { return Letters(count, letter); }

/// The normalised dims whole.
std::optional<Strategies> layer_norm(const OpCall& call) {
  const Spec& input = call.tensors[0];
  const auto inner = call.integers("normalized_shape").size();
  if (static_cast<int64_t>(inner) > input.ndim()) return std::nullopt;
  const size_t outer = input.ndim() - inner;
  Letters all = identity(input.ndim());
  std::fill(all.begin() + static_cast<std::ptrdiff_t>(outer), all.end(), kUnsharded);
  Named named(call);
  named.set("input", all);
  named.set("weight", filled(inner, kUnsharded));
  named.set("bias", filled(inner, kUnsharded));
  Shape statistics = input.shape().vec();
  std::fill(statistics.begin() + static_cast<std::ptrdiff_t>(outer), statistics.end(), 1);
  Einsum einsum{.inputs = named.take(), .outputs = {all, all, all}};
  return Strategies{strategies_of(einsum), {{input.shape().vec()}, {statistics}, {statistics}}};
}

std::optional<Strategies> layer_norm_backward(const OpCall& call) {
  const Shape normalized = call.integers("normalized_shape");
  const size_t inner = normalized.size();
  const Spec& input = call.tensors[1];
  if (!call.tensor("grad_out") || !call.tensor("input")) return std::nullopt;
  const size_t outer = input.ndim() - inner;
  Letters all = identity(input.ndim());
  std::fill(all.begin() + static_cast<std::ptrdiff_t>(outer), all.end(), kUnsharded);
  Named named(call);
  named.set("grad_out", all);
  named.set("input", all);
  named.set("mean", all);
  named.set("rstd", all);
  named.set("weight", filled(inner, kUnsharded));
  named.set("bias", filled(inner, kUnsharded));
  const bool with_bias = call.position("bias").has_value();
  Einsum einsum{.inputs = named.take(), .outputs = {all, filled(inner, kUnsharded)}};
  std::vector<Result> results{{input.shape().vec()}, {normalized}};
  if (with_bias) {
    einsum.outputs.push_back(filled(inner, kUnsharded));
    results.push_back({normalized});
  }
  return Strategies{strategies_of(einsum), std::move(results)};
}

/// The batch may be cut; how much of it there is is an argument.
Localize with_local_batch(size_t position, size_t input) {
  return [=](const ChosenSpecs& chosen) {
    return LocalCall{{{position, chosen.inputs[input].local_shape()[0]}}};
  };
}

std::optional<Strategies> group_norm(const OpCall& call) {
  const Spec& input = call.tensors[0];
  const int64_t groups = call.integer("group");
  if (input.ndim() < 2) return std::nullopt;
  Letters batch = filled(input.ndim(), kUnsharded);
  batch[0] = 'n';
  Named named(call);
  named.set("input", batch);
  named.set("weight", {kUnsharded});
  named.set("bias", {kUnsharded});
  Einsum einsum{.inputs = named.take(), .outputs = {batch, {'n', kUnsharded}, {'n', kUnsharded}}};
  const Shape statistics{input.shape()[0], groups};
  Strategies strategies{strategies_of(einsum), {{input.shape().vec()}, {statistics}, {statistics}}};
  strategies.localize = with_local_batch(*call.position("N"), 0);
  return strategies;
}

std::optional<Strategies> group_norm_backward(const OpCall& call) {
  if (!call.tensor("grad_out") || !call.tensor("input")) return std::nullopt;
  const Spec& input = call.tensors[1];
  if (input.ndim() < 2) return std::nullopt;
  Letters batch = filled(input.ndim(), kUnsharded);
  batch[0] = 'n';
  Named named(call);
  named.set("grad_out", batch);
  named.set("input", batch);
  named.set("mean", {'n', kUnsharded});
  named.set("rstd", {'n', kUnsharded});
  named.set("weight", {kUnsharded});
  Einsum einsum{.inputs = named.take(), .outputs = {batch, {kUnsharded}, {kUnsharded}}};
  const Shape channels{input.shape()[1]};
  Strategies strategies{strategies_of(einsum), {{input.shape().vec()}, {channels}, {channels}}};
  strategies.localize = with_local_batch(*call.position("N"), 1);
  return strategies;
}

/// Statistics are over all dims but the second. That may be cut; where another one is, they are computed by
/// means.
struct BatchNorm {
  Letters input;
  Letters channels{'c'};
  Shape others;  // dims

  explicit BatchNorm(const Spec& spec, bool whole) : input(identity(spec.ndim())) {
    for (int64_t d = 0; d < spec.ndim(); ++d) {
      if (d == 1) continue;
      others.push_back(d);
      if (whole) input[d] = kUnsharded;
    }
    input[1] = 'c';
    if (!whole) {
      for (const int64_t d : others) input[d] = static_cast<char>('p' + d);
    }
  }
};

/// A vector of channels as a tensor that meets the input.
at::Tensor meeting(const at::Tensor& channels, int64_t ndim) {
  Shape shape(ndim, 1);
  shape[1] = channels.numel();
  return channels.view(shape);
}

at::Tensor or_undefined(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

Stack batch_norm_by_means(const c10::OperatorHandle& op, Stack arguments) {
  const bool has_statistics = op.schema().argumentIndexWithName("running_mean").has_value();
  const size_t at = has_statistics ? 5 : 3;
  const at::Tensor input = arguments[0].toTensor(), x = wide(input);
  const at::Tensor weight = or_undefined(arguments[1]), bias = or_undefined(arguments[2]);
  const double momentum = arguments[at + 1].toDouble(), eps = arguments[at + 2].toDouble();
  Shape others;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (d != 1) others.push_back(d);
  }
  const int64_t count = x.numel() / std::max<int64_t>(x.size(1), 1);
  // Reduced here once, not at each use.
  const at::Tensor mean = at::add(at::mean(x, others), 0);
  const at::Tensor difference = at::sub(x, meeting(mean, x.dim()));
  const at::Tensor variance = at::add(at::mean(at::mul(difference, difference), others), 0);
  const at::Tensor inverse = at::rsqrt(at::add(variance, eps));
  at::Tensor result = at::mul(difference, meeting(inverse, x.dim()));
  if (weight.defined()) result = at::mul(result, meeting(weight, x.dim()));
  if (bias.defined()) result = at::add(result, meeting(bias, x.dim()));
  if (has_statistics) {
    const at::Tensor running_mean = or_undefined(arguments[3]), running_var = or_undefined(arguments[4]);
    const double unbiased = static_cast<double>(count) / static_cast<double>(std::max<int64_t>(count - 1, 1));
    if (running_mean.defined())
      running_mean.mul_(1 - momentum).add_(mean.to(running_mean.scalar_type()), momentum);
    if (running_var.defined())
      running_var.mul_(1 - momentum).add_(variance.to(running_var.scalar_type()), momentum * unbiased);
  }
  return {result.to(input.scalar_type()), mean, inverse};
}

/// By the operator, but on ranks that hold nothing of the first tensor, which libtorch refuses, or divides by
/// the size of. These have nothing to write either.
Localize if_empty(const Function& compute) {
  return [compute](const ChosenSpecs& chosen) {
    LocalCall local;
    local.writes = true;
    if (chosen.inputs[0].is_replicated()) return local;
    local.compute = [compute](const c10::OperatorHandle& op, Stack arguments) {
      if (arguments[0].toTensor().numel() == 0) return compute(op, std::move(arguments));
      op.callBoxed(arguments);
      return arguments;
    };
    return local;
  };
}

std::optional<Strategies> batch_norm(const OpCall& call) {
  const Spec& input = call.tensors[0];
  if (input.ndim() < 2 || input.numel() == 0) return std::nullopt;
  // Libtorch refuses other statistics and parameters, but only where it computes something.
  if (std::any_of(call.tensors.begin() + 1, call.tensors.end(), [](const Spec& s) { return s.ndim() != 1; }))
    return std::nullopt;
  const bool training = !call.position("training") || call.flag("training");
  const BatchNorm dims(input, training);
  // Running statistics that are written without being said to be must not be moved.
  const bool moves = call.tensor("running_mean") && !call.written[*call.tensor("running_mean")] &&
                     !std::all_of(call.tensors.begin(), call.tensors.end(),
                                  [](const Spec& spec) { return spec.is_replicated(); });
  if (training && (moves || is_sharded_on(input, dims.others))) {
    Strategies strategies;
    strategies.decompose = batch_norm_by_means;
    strategies.writes = true;
    return strategies;
  }
  Named named(call);
  named.set("input", dims.input);
  for (const char* name : {"weight", "bias", "running_mean", "running_var"}) named.set(name, dims.channels);
  const Shape channels = training ? Shape{input.shape()[1]} : Shape{0};
  Einsum einsum{.inputs = named.take(),
                .outputs = {dims.input, training ? dims.channels : Letters{kUnsharded}, {}}};
  einsum.outputs[2] = einsum.outputs[1];
  if (!training) {
    // What is saved for the gradient is empty.
    einsum.contracted = Replicate();
  }
  Strategies strategies{strategies_of(einsum),
                        {{input.shape().vec(), dense_strides(input)}, {channels}, {channels}}};
  strategies.localize = if_empty([training](const c10::OperatorHandle&, Stack arguments) {
    const at::Tensor x = arguments[0].toTensor(), saved = x.new_zeros({training ? x.size(1) : 0});
    return Stack{at::empty_like(x), saved, saved.clone()};
  });
  return strategies;
}

Stack batch_norm_backward_by_sums(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor gradient = wide(arguments[0].toTensor()), input = arguments[1].toTensor(), x = wide(input);
  const at::Tensor weight = or_undefined(arguments[2]);
  const bool training = arguments[7].toBool();
  const auto mask = arguments[9].toBoolList();
  Shape others;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (d != 1) others.push_back(d);
  }
  const double count = static_cast<double>(x.numel()) / static_cast<double>(std::max<int64_t>(x.size(1), 1));
  const at::Tensor mean = training ? arguments[5].toTensor() : arguments[3].toTensor();
  const at::Tensor inverse = training ? arguments[6].toTensor()
                                      : at::rsqrt(at::add(arguments[4].toTensor(), arguments[8].toDouble()));
  const at::Tensor normal = at::mul(at::sub(x, meeting(mean, x.dim())), meeting(inverse, x.dim()));
  // Reduced here once, not at each use.
  const at::Tensor of_bias = at::add(at::sum(gradient, others), 0);
  const at::Tensor of_weight = at::add(at::sum(at::mul(gradient, normal), others), 0);
  at::Tensor of_input;
  if (mask[0]) {
    at::Tensor scale = weight.defined() ? at::mul(inverse, weight) : inverse;
    at::Tensor inner = gradient;
    if (training) {
      inner = at::sub(inner, meeting(at::div(of_bias, count), x.dim()));
      inner = at::sub(inner, at::mul(normal, meeting(at::div(of_weight, count), x.dim())));
    }
    of_input = at::mul(inner, meeting(scale, x.dim())).to(input.scalar_type());
  }
  return {of_input, mask[1] ? of_weight : at::Tensor(), mask[2] ? of_bias : at::Tensor()};
}

std::optional<Strategies> batch_norm_backward(const OpCall& call) {
  if (!call.tensor("grad_out") || !call.tensor("input")) return std::nullopt;
  const Spec& input = call.tensors[1];
  if (input.ndim() < 2 || input.numel() == 0) return std::nullopt;
  const BatchNorm dims(input, true);
  if (is_sharded_on(input, dims.others) || is_sharded_on(call.tensors[0], dims.others)) {
    Strategies strategies;
    strategies.decompose = batch_norm_backward_by_sums;
    return strategies;
  }
  Named named(call);
  named.set("grad_out", dims.input);
  named.set("input", dims.input);
  const bool training = call.flag("train");
  for (const char* name : {"weight", "running_mean", "running_var"}) named.set(name, dims.channels);
  // Empty unless in training.
  for (const char* name : {"save_mean", "save_invstd"})
    named.set(name, training ? dims.channels : Letters{kUnsharded});
  Einsum einsum{.inputs = named.take(), .outputs = {dims.input, dims.channels, dims.channels}};
  const Shape channels{input.shape()[1]};
  Strategies strategies{strategies_of(einsum),
                        {{input.shape().vec(), dense_strides(input)}, {channels}, {channels}}};
  strategies.localize = if_empty([](const c10::OperatorHandle&, Stack arguments) {
    const at::Tensor x = arguments[1].toTensor();
    const auto mask = arguments[9].toBoolList();
    auto wanted = [&](size_t i, const at::Tensor& gradient) { return mask[i] ? gradient : at::Tensor(); };
    return Stack{wanted(0, at::empty_like(x)), wanted(1, x.new_zeros({x.size(1)})),
                 wanted(2, x.new_zeros({x.size(1)}))};
  });
  return strategies;
}

/// Operators that return, and get back, what some devices keep for the gradient, which here is nothing.
Rule by_native(const Function& compute) {
  return {"by native_batch_norm, or its gradient", [compute](const OpCall&) {
            Strategies strategies{{}, {}, {}, compute};
            strategies.writes = true;
            return std::optional(std::move(strategies));
          }};
}

Stack with_reserve(const at::Tensor& x, const std::tuple<at::Tensor, at::Tensor, at::Tensor>& results) {
  const auto& [output, mean, inverse] = results;
  return {output, mean, inverse, x.new_empty({0}, x.options().dtype(at::kByte))};
}

Stack batch_norm_with_update(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor x = arguments[0].toTensor();
  at::Tensor mean = arguments[3].toTensor(), variance = arguments[4].toTensor();
  return with_reserve(x, at::_native_batch_norm_legit(
                             x, or_undefined(arguments[1]), or_undefined(arguments[2]), mean, variance,
                             /*training=*/true, arguments[5].toDouble(), arguments[6].toDouble()));
}

Stack batch_norm_no_update(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor x = arguments[0].toTensor();
  return with_reserve(
      x, at::native_batch_norm(x, or_undefined(arguments[1]), or_undefined(arguments[2]),
                               or_undefined(arguments[3]), or_undefined(arguments[4]), /*training=*/false,
                               arguments[5].toDouble(), arguments[6].toDouble()));
}

Stack batch_norm_backward_with_reserve(const c10::OperatorHandle&, Stack arguments) {
  const auto mask = arguments[9].toBoolList();
  const auto [of_input, of_weight, of_bias] = at::native_batch_norm_backward(
      arguments[0].toTensor(), arguments[1].toTensor(), or_undefined(arguments[2]),
      or_undefined(arguments[3]), or_undefined(arguments[4]), or_undefined(arguments[5]),
      or_undefined(arguments[6]), arguments[7].toBool(), arguments[8].toDouble(),
      std::array<bool, 3>{mask[0], mask[1], mask[2]});
  return {of_input, of_weight, of_bias};
}

/// All dims but one.
Shape but(int64_t dim, int64_t ndim) {
  Shape result;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) result.push_back(d);
  }
  return result;
}

Stack weight_norm_by_norm(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor v = arguments[0].toTensor(), g = arguments[1].toTensor();
  const Shape others = but(wrapped(arguments[2].toInt(), v.dim()), v.dim());
  const at::Tensor norms = at::add(at::linalg_vector_norm(wide(v), 2, others, /*keepdim=*/true), 0);
  return {at::mul(v, at::div(g, norms).to(v.scalar_type())), norms};
}

Stack weight_norm_backward_by_sums(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor gradient = wide(arguments[0].toTensor()), v = arguments[1].toTensor(),
                   g = arguments[2].toTensor(), norms = arguments[3].toTensor();
  const Shape others = but(wrapped(arguments[4].toInt(), v.dim()), v.dim());
  // Reduced here once, not at each use.
  const at::Tensor along =
      at::add(at::div(at::sum(at::mul(gradient, wide(v)), others, /*keepdim=*/true), norms), 0);
  const at::Tensor across = at::sub(gradient, at::mul(wide(v), at::div(along, norms)));
  return {at::mul(across, at::div(wide(g), norms)).to(v.scalar_type()), along.to(g.scalar_type())};
}

/// Norms over all dims but one: that may be cut; where another one is, by norms or sums of parts.
Rule but_one_dim(const char* text, size_t results, const Function& by_parts) {
  return {
      text,
      [=](const OpCall& call) -> std::optional<Strategies> {
        const Spec& v = call.tensors[call.tensors.size() == 4 ? 1 : 0];
        const int64_t dim = wrapped(call.integer("dim"), v.ndim());
        const bool is_parted = std::any_of(call.tensors.begin(), call.tensors.end(), [&](const Spec& spec) {
          return spec.ndim() == v.ndim() && is_sharded_on(spec, but(dim, v.ndim()));
        });
        if (v.numel() == 0 || v.ndim() == 0) return std::nullopt;
        Strategies strategies;
        if (is_parted && at::isFloatingType(v.dtype())) {
          strategies.decompose = by_parts;
          return strategies;
        }
        strategies.options = {{Placements(call.tensors.size(), Shard(dim)), {Shard(dim)}, v.shape()[dim]}};
        Shape norms(v.ndim(), 1);
        norms[dim] = v.shape()[dim];
        strategies.results = {{v.shape().vec()}, {norms}};
        strategies.results.resize(results);
        return strategies;
      },
      {"dim"}};
}

Stack renorm_by_norm(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor x = arguments[0].toTensor();
  const Shape others = but(wrapped(arguments[2].toInt(), x.dim()), x.dim());
  const double largest = arguments[3].toScalar().toDouble();
  const at::Tensor norms =
      at::add(at::linalg_vector_norm(wide(x), arguments[1].toScalar(), others, /*keepdim=*/true), 0);
  const at::Tensor factors =
      at::where(at::gt(norms, largest), at::div(at::full_like(norms, largest), at::add(norms, 1e-7)),
                at::ones_like(norms));
  return {at::mul(x, factors.to(x.scalar_type()))};
}

Rule with_memory_format(Rule rule) {
  rule.keeps_memory_format = true;
  return rule;
}

}  // namespace

Table normalize_rules() {
  return {
      {{"_softmax"}, for_loss_parallel(softmax_rule("the dim whole; if cut, by amax, exp and sum", softmax))},
      {{"_log_softmax"},
       for_loss_parallel(softmax_rule("the dim whole; if cut, by amax, exp and sum", log_softmax))},
      {{"_safe_softmax"}, softmax_rule("the dim whole; if cut, by softmax, eq and all", composite())},
      {{"_softmax_backward_data"},
       for_loss_parallel(softmax_rule("the dim whole; if cut, by sum", softmax_backward))},
      {{"_log_softmax_backward_data"},
       for_loss_parallel(softmax_rule("the dim whole; if cut, by sum", log_softmax_backward))},
      {{"native_layer_norm"}, {"the normalised dims whole", layer_norm, {"normalized_shape"}}},
      {{"native_layer_norm_backward", "_fused_rms_norm_backward"},
       {"the normalised dims whole; gradients of parameters P(sum)",
        layer_norm_backward,
        {"normalized_shape"}}},
      {{"_weight_norm_interface"},
       but_one_dim("the dim cut; if another is, by norm", 2, weight_norm_by_norm)},
      {{"_weight_norm_interface_backward"},
       but_one_dim("the dim cut; if another is, by sum", 2, weight_norm_backward_by_sums)},
      {{"renorm"}, but_one_dim("the dim cut; if another is, by norm", 1, renorm_by_norm)},
      {{"native_group_norm"}, with_memory_format({"cut along the batch", group_norm, {"group"}})},
      {{"native_group_norm_backward"},
       with_memory_format({"cut along the batch; gradients of parameters P(sum)", group_norm_backward})},
      {{"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_no_training"},
       {"cut along the channels, and if not in training along all; else by means", batch_norm, {"training"}}},
      {{"_batch_norm_with_update"}, by_native(batch_norm_with_update)},
      {{"_batch_norm_no_update"}, by_native(batch_norm_no_update)},
      {{"batch_norm_backward"}, by_native(batch_norm_backward_with_reserve)},
      {{"_native_batch_norm_legit_functional", "_batch_norm_with_update_functional"},
       composed({"clones of the statistics", "which the operator that writes gets"})},
      {{"native_batch_norm_backward"},
       {"cut along the channels; else by sums", batch_norm_backward, {"train"}}},
  };
}

}  // namespace tessera::ops
