#include <tessera/ops/family.h>

#include <algorithm>
#include <array>
#include <tuple>

#include <ATen/ATen.h>

namespace tessera::ops {

namespace {

/// What values are computed in.
at::Tensor wide(const at::Tensor& x) {
  const bool narrow = x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
  return narrow ? x.to(at::kFloat) : x;
}

/// Along one dim: where that is sharded, by small reductions instead of a gather.
Rule softmax_rule(Names by, const Function& compute) {
  Rule rule = UnshardedDims{.dims = {"dim"}, .if_sharded = Decomposition{std::move(by), compute}};
  rule.can_be_tried = true;
  return rule;
}

Stack softmax(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor x = named.tensor("self"), values = wide(x);
  const int64_t dim = named["dim"].toInt();
  const at::Tensor powers = at::exp(at::sub(values, at::amax(values, dim, /*keepdim=*/true)));
  const at::Tensor result = at::div(powers, at::sum(powers, dim, /*keepdim=*/true));
  return {named["half_to_float"].toBool() ? result : result.to(x.scalar_type())};
}

Stack log_softmax(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor x = named.tensor("self"), values = wide(x);
  const int64_t dim = named["dim"].toInt();
  const at::Tensor shifted = at::sub(values, at::amax(values, dim, /*keepdim=*/true));
  const at::Tensor result = at::sub(shifted, at::log(at::sum(at::exp(shifted), dim, /*keepdim=*/true)));
  return {named["half_to_float"].toBool() ? result : result.to(x.scalar_type())};
}

Stack softmax_backward(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor gradient = wide(named.tensor("grad_output")), output = wide(named.tensor("output"));
  const at::Tensor product = at::mul(gradient, output);
  const at::Tensor sum = at::sum(product, named["dim"].toInt(), /*keepdim=*/true);
  return {at::sub(product, at::mul(output, sum)).to(named["input_dtype"].toScalarType())};
}

Stack log_softmax_backward(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor gradient = wide(named.tensor("grad_output")), output = wide(named.tensor("output"));
  const at::Tensor sum = at::sum(gradient, named["dim"].toInt(), /*keepdim=*/true);
  return {at::sub(gradient, at::mul(at::exp(output), sum)).to(named["input_dtype"].toScalarType())};
}

/// Letters of tensors given by name; those that were left out are skipped.
class Named {
 public:
  explicit Named(const OpCall& call) : call_(call), letters_(call.tensors.size()) {}
  void set(std::string_view name, Letters letters) {
    if (const auto index = call_.tensor(name)) letters_[*index] = std::move(letters);
  }
  std::vector<Letters> take() { return std::move(letters_); }

 private:
  const OpCall& call_;
  std::vector<Letters> letters_;
};

/// The size of the batch is an argument: on a rank, that of its shard of `like`.
LocalStep with_local_batch(const char* like) {
  return {"the local size of the batch in `N`", [like](const OpCall& call) -> Localize {
            return [position = *call.position("N"), index = *call.tensor(like)](const ChosenSpecs& chosen) {
              return LocalCall{{{position, chosen.inputs[index].local_shape()[0]}}};
            };
          }};
}

Rule group_norm_rule(const char* letters) {
  Rule rule = Pattern{{letters}};
  rule.local = with_local_batch("input");
  rule.keeps_memory_format = true;
  return rule;
}

/// All dims but one.
Shape but(int64_t dim, int64_t ndim) {
  Shape result;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim) result.push_back(d);
  }
  return result;
}

/// Statistics are over all dims but the second. That may be sharded; where another one is, they are computed
/// by means.
struct BatchNorm {
  Letters input;
  Letters channels{'c'};
  Shape others;  // dims

  /// The dims of statistics are unsharded where these are computed.
  enum class Others { unsharded, sharded };
  BatchNorm(const Spec& spec, Others kind) : input(identity(spec.ndim())), others(but(1, spec.ndim())) {
    input[1] = 'c';
    for (const int64_t d : others)
      input[d] = kind == Others::unsharded ? kUnsharded : static_cast<char>('p' + d);
  }
};

/// A vector of channels as a tensor that meets the input.
at::Tensor meeting(const at::Tensor& channels, int64_t ndim) {
  Shape shape(ndim, 1);
  shape[1] = channels.numel();
  return channels.view(shape);
}

Stack batch_norm_by_means(const c10::OperatorHandle& op, Stack arguments) {
  const bool has_statistics = op.schema().argumentIndexWithName("running_mean").has_value();
  const NamedArguments named(op, arguments);
  const at::Tensor input = named.tensor("input"), x = wide(input);
  const at::Tensor weight = named.tensor("weight"), bias = named.tensor("bias");
  const double momentum = named["momentum"].toDouble(), eps = named["eps"].toDouble();
  const Shape others = but(1, x.dim());
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
    const at::Tensor running_mean = named.tensor("running_mean"), running_var = named.tensor("running_var");
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
      if (self_tensor(arguments).numel() == 0) return compute(op, std::move(arguments));
      op.callBoxed(arguments);
      return arguments;
    };
    return local;
  };
}

std::optional<Strategies> batch_norm(const OpCall& call) {
  const Spec& input = call.tensors[0];
  if (input.ndim() < 2 || input.numel() == 0) return std::nullopt;
  // libtorch refuses other statistics and parameters, but only where it computes something.
  if (std::any_of(call.tensors.begin() + 1, call.tensors.end(), [](const Spec& s) { return s.ndim() != 1; }))
    return std::nullopt;
  const bool training = call.position("training") && call.flag("training");
  const BatchNorm dims(input, training ? BatchNorm::Others::unsharded : BatchNorm::Others::sharded);
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
    const at::Tensor x = self_tensor(arguments), saved = x.new_zeros({training ? x.size(1) : 0});
    return Stack{at::empty_like(x), saved, saved.clone()};
  });
  return strategies;
}

Stack batch_norm_backward_by_sums(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor gradient = wide(named.tensor("grad_out")), input = named.tensor("input"), x = wide(input);
  const at::Tensor weight = named.tensor("weight");
  const bool training = named["train"].toBool();
  const auto mask = named["output_mask"].toBoolList();
  const Shape others = but(1, x.dim());
  const double count = static_cast<double>(x.numel()) / static_cast<double>(std::max<int64_t>(x.size(1), 1));
  const at::Tensor mean = named.tensor(training ? "save_mean" : "running_mean");
  const at::Tensor inverse = training
                                 ? named.tensor("save_invstd")
                                 : at::rsqrt(at::add(named.tensor("running_var"), named["eps"].toDouble()));
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
  const BatchNorm dims(input, BatchNorm::Others::unsharded);
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
  strategies.localize = if_empty([](const c10::OperatorHandle& op, Stack arguments) {
    const NamedArguments named(op, arguments);
    const at::Tensor x = named.tensor("input");
    const auto mask = named["output_mask"].toBoolList();
    auto wanted = [&](size_t i, const at::Tensor& gradient) { return mask[i] ? gradient : at::Tensor(); };
    return Stack{wanted(0, at::empty_like(x)), wanted(1, x.new_zeros({x.size(1)})),
                 wanted(2, x.new_zeros({x.size(1)}))};
  });
  return strategies;
}

/// Operators that return, and get back, what some devices keep for the gradient, which here is nothing.
Decomposition by_native(const char* by, const Function& compute) { return {{by}, compute, /*writes=*/true}; }

Stack with_reserve(const at::Tensor& x, const std::tuple<at::Tensor, at::Tensor, at::Tensor>& results) {
  const auto& [output, mean, inverse] = results;
  return {output, mean, inverse, x.new_empty({0}, x.options().dtype(at::kByte))};
}

Stack batch_norm_with_update(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor x = named.tensor("input");
  at::Tensor mean = named.tensor("running_mean"), variance = named.tensor("running_var");
  return with_reserve(x, at::_native_batch_norm_legit(
                             x, named.tensor("weight"), named.tensor("bias"), mean, variance,
                             /*training=*/true, named["momentum"].toDouble(), named["eps"].toDouble()));
}

Stack batch_norm_no_update(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor x = named.tensor("input");
  return with_reserve(
      x, at::native_batch_norm(x, named.tensor("weight"), named.tensor("bias"), named.tensor("running_mean"),
                               named.tensor("running_var"), /*training=*/false, named["momentum"].toDouble(),
                               named["eps"].toDouble()));
}

Stack batch_norm_backward_with_reserve(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const auto mask = named["output_mask"].toBoolList();
  const auto [of_input, of_weight, of_bias] = at::native_batch_norm_backward(
      named.tensor("grad_out"), named.tensor("input"), named.tensor("weight"), named.tensor("running_mean"),
      named.tensor("running_var"), named.tensor("save_mean"), named.tensor("save_var"),
      named["update"].toBool(), named["eps"].toDouble(), std::array<bool, 3>{mask[0], mask[1], mask[2]});
  return {of_input, of_weight, of_bias};
}

Stack weight_norm_by_norm(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor v = named.tensor("v"), g = named.tensor("g");
  const Shape others = but(wrapped(named["dim"].toInt(), v.dim()), v.dim());
  const at::Tensor norms = at::add(at::linalg_vector_norm(wide(v), 2, others, /*keepdim=*/true), 0);
  return {at::mul(v, at::div(g, norms).to(v.scalar_type())), norms};
}

Stack weight_norm_backward_by_sums(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor gradient = wide(named.tensor("grad_w")), v = named.tensor("saved_v"),
                   g = named.tensor("saved_g"), norms = named.tensor("saved_norms");
  const Shape others = but(wrapped(named["dim"].toInt(), v.dim()), v.dim());
  // Reduced here once, not at each use.
  const at::Tensor along =
      at::add(at::div(at::sum(at::mul(gradient, wide(v)), others, /*keepdim=*/true), norms), 0);
  const at::Tensor across = at::sub(gradient, at::mul(wide(v), at::div(along, norms)));
  return {at::mul(across, at::div(wide(g), norms)).to(v.scalar_type()), along.to(g.scalar_type())};
}

/// Norms over all dims but one: that may be sharded.
UnshardedDims but_one_dim(size_t results, Names by, const Function& compute) {
  return {.dims = {"dim"},
          .all_but = true,
          .results = results,
          .same_size = false,
          .never_empty = true,
          .if_sharded = Decomposition{std::move(by), compute}};
}

Stack renorm_by_norm(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor x = named.tensor("self");
  const Shape others = but(wrapped(named["dim"].toInt(), x.dim()), x.dim());
  const double largest = named["maxnorm"].toScalar().toDouble();
  const at::Tensor norms =
      at::add(at::linalg_vector_norm(wide(x), named["p"].toScalar(), others, /*keepdim=*/true), 0);
  const at::Tensor factors =
      at::where(at::gt(norms, largest), at::div(at::full_like(norms, largest), at::add(norms, 1e-7)),
                at::ones_like(norms));
  return {at::mul(x, factors.to(x.scalar_type()))};
}

}  // namespace

Table normalize_rules() {
  const Names by_sums{"amax", "exp", "sum"};
  Rule with_reserve = by_native("native_batch_norm_backward", batch_norm_backward_with_reserve);
  // The reserve is bytes. What is called instead looks at the others.
  with_reserve.may_refuse_dtypes = [](Dtypes) { return false; };
  return {
      {{"_softmax"}, for_loss_parallel(softmax_rule(by_sums, softmax))},
      {{"_log_softmax"}, for_loss_parallel(softmax_rule(by_sums, log_softmax))},
      {{"_safe_softmax"}, softmax_rule({"softmax", "eq", "all"}, composite())},
      {{"_softmax_backward_data"}, for_loss_parallel(softmax_rule({"sum"}, softmax_backward))},
      {{"_log_softmax_backward_data"}, for_loss_parallel(softmax_rule({"sum"}, log_softmax_backward))},
      {{"native_layer_norm"}, Pattern{.letters = {"B..,..?,..?->B*,B..,B.."}, .inner = "normalized_shape"}},
      {{"native_layer_norm_backward"},
       Pattern{.letters = {"B..,B..,B..,B..,..?,..?->B*,*,*"}, .inner = "normalized_shape"}},
      {{"_fused_rms_norm_backward"},
       Pattern{.letters = {"B..,B..,B..,..?->B*,*"}, .inner = "normalized_shape"}},
      {{"_weight_norm_interface"}, but_one_dim(2, {"norm"}, weight_norm_by_norm)},
      {{"_weight_norm_interface_backward"}, but_one_dim(2, {"sum"}, weight_norm_backward_by_sums)},
      {{"renorm"}, but_one_dim(1, {"norm"}, renorm_by_norm)},
      {{"native_group_norm"}, group_norm_rule("n..,.?,.?->n*,n.,n.")},
      {{"native_group_norm_backward"}, group_norm_rule("n..,n..,n.,n.,.?->n*,.,.")},
      {{"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_no_training"},
       {"channels sharded, and if not in training all dims; else by means",
        batch_norm,
        {"training"},
        "some of these write running statistics without saying so, which must not be redistributed then"}},
      {{"_batch_norm_with_update"}, by_native("_native_batch_norm_legit", batch_norm_with_update)},
      {{"_batch_norm_no_update"}, by_native("native_batch_norm", batch_norm_no_update)},
      {{"batch_norm_backward"}, std::move(with_reserve)},
      {{"_native_batch_norm_legit_functional", "_batch_norm_with_update_functional"},
       composed({"clone", "_native_batch_norm_legit", "_batch_norm_with_update"})},
      {{"native_batch_norm_backward"},
       {"channels sharded; else by sums",
        batch_norm_backward,
        {"train"},
        "what was saved is empty unless in training"}},
  };
}

}  // namespace tessera::ops
