#include <tessera/rules/family.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

/// Whether integers stay of their dtype. Their sums wrap around, so that parts of these must not be
/// converted.
bool keeps_integers(const Call& call) {
  std::optional<at::ScalarType> dtype;
  bool keeps = true;
  const auto add = [&](at::ScalarType other) {
    if (other == at::kBool) return;
    keeps = keeps && at::isIntegralType(other, /*includeBool=*/false) && dtype.value_or(other) == other;
    dtype = other;
  };
  const bool has_dims =
      std::any_of(call.tensors.begin(), call.tensors.end(), [](const Spec& s) { return s.ndim() > 0; });
  for (const Spec& spec : call.tensors) {
    if (spec.ndim() > 0 || !has_dims || !at::isIntegralType(spec.dtype(), /*includeBool=*/true))
      add(spec.dtype());
  }
  for (const c10::IValue& plain : call.arguments) {
    if (plain.isTensor() &&
        (!has_dims || !at::isIntegralType(plain.toTensor().scalar_type(), /*includeBool=*/true)))
      add(plain.toTensor().scalar_type());
  }
  return keeps;
}

/// `integers`: it is linear in integers too, whose results are integers.
Rule linear_rule(std::string text, const Linear& linear, bool integers = false) {
  return {std::move(text), [=](const Call& call) {
            Linear sets;
            for (const std::vector<size_t>& set : linear) {
              bool converts = false;
              for (const size_t i : c10::irange(call.tensors.size())) {
                converts = converts || (at::isIntegralType(call.tensors[i].dtype(), /*includeBool=*/false) &&
                                        std::find(set.begin(), set.end(), call.positions[i]) != set.end());
              }
              if (!converts || (integers && keeps_integers(call))) sets.push_back(set);
            }
            return pointwise(call, sets);
          }};
}

Rule monotone() {
  return {"pointwise, increasing", [](const Call& call) {
            const bool is_ordered = !c10::isComplexType(call.tensors[0].dtype());
            return is_ordered ? pointwise(call, {}, {ReduceOp::max, ReduceOp::min}) : pointwise(call);
          }};
}

/// The same on every rank, whatever it holds.
std::optional<Proposal> same(const Call& call) {
  const Spec& spec = call.tensors[0];
  const Letters all = identity(spec.ndim());
  return moved(all, all, {spec.shape().vec(), spec.strides().vec()});
}

/// In memory of its own.
std::optional<Proposal> copied(const Call& call) {
  const Letters all = identity(call.tensors[0].ndim());
  return moved(all, all, {call.tensors[0].shape().vec(), new_strides(call)});
}

std::optional<Proposal> cast(const Call& call) {
  const bool same_dtype = !call.has("dtype") || call.value("dtype").toScalarType() == call.tensors[0].dtype();
  if (same_dtype) return copied(call);
  auto proposal = pointwise(call);
  if (proposal) proposal->results[0].strides = new_strides(call);
  return proposal;
}

std::optional<Proposal> copy(const Call& call) {
  const bool same_dtype = call.tensors.size() == 2 && call.tensors[0].dtype() == call.tensors[1].dtype();
  return pointwise(call, same_dtype ? Linear{{0, 1}} : Linear{});
}

/// One value everywhere: what reducing equal values leaves as it is may stay partial.
std::optional<Proposal> fill(const Call& call) {
  return pointwise(call, {}, {ReduceOp::avg, ReduceOp::min, ReduceOp::max});
}

std::optional<Proposal> equal(const Call& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  Proposal proposal;
  if (call.tensors[0].shape() != call.tensors[1].shape()) {
    if (call.tensors[0].dtype() != call.tensors[1].dtype()) return std::nullopt;
    proposal.decompose = [](const c10::OperatorHandle&, Stack) { return Stack{false}; };
    return proposal;
  }
  proposal.decompose = [](const c10::OperatorHandle&, Stack arguments) {
    const bool result = at::all(at::eq(arguments[0].toTensor(), arguments[1].toTensor())).item<bool>();
    return Stack{result};
  };
  return proposal;
}

std::optional<Proposal> allclose(const Call& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  Proposal proposal;
  proposal.decompose = [](const c10::OperatorHandle&, Stack arguments) {
    const at::Tensor close =
        at::isclose(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toDouble(),
                    arguments[3].toDouble(), arguments[4].toBool());
    return Stack{at::all(close).item<bool>()};
  };
  return proposal;
}

/// Both results are of the shape that the arguments have together.
std::optional<Proposal> prelu_backward(const Call& call) {
  auto proposal = pointwise(call, {{0}});
  if (proposal) {
    proposal->results.resize(2, proposal->results.at(0));
    for (Row& row : proposal->rows) row.outputs.resize(2, row.outputs.at(0));
  }
  return proposal;
}

/// As libtorch computes it, where both results are of the input's shape.
std::optional<Proposal> log_sigmoid(const Call&) {
  Proposal proposal;
  proposal.decompose = [](const c10::OperatorHandle&, Stack arguments) {
    const at::Tensor x = arguments[0].toTensor();
    const at::Tensor buffer = at::exp(at::neg(at::abs(x)));
    return Stack{at::sub(at::clamp_max(x, 0), at::log1p(buffer)), buffer};
  };
  return proposal;
}

}  // namespace

bool converts_parts(const Call& call) {
  const auto from = call.tensors[0].dtype();
  const bool is_given = call.has("dtype");
  // Their sums wrap around, so that parts of these must not be widened; sums of them are int64.
  if (at::isIntegralType(from, /*includeBool=*/false))
    return from == (is_given ? call.value("dtype").toScalarType() : at::kLong);
  if (!is_given) return true;
  const auto to = call.value("dtype").toScalarType();
  return to != at::kBool && (!at::isIntegralType(to, false) || at::isIntegralType(from, false)) &&
         (at::isComplexType(to) || !at::isComplexType(from));
}

std::vector<std::vector<size_t>> linear_tensors(const Call& call, const Linear& linear) {
  std::vector<std::vector<size_t>> result;
  for (const auto& set : linear) {
    std::vector<size_t> tensors;
    for (const size_t position : set) {
      const auto found = std::find(call.positions.begin(), call.positions.end(), position);
      // A number added to a partial sum would be added once for each rank.
      if (found != call.positions.end()) tensors.push_back(found - call.positions.begin());
    }
    const bool sums = std::none_of(tensors.begin(), tensors.end(), [&](size_t i) {
      return call.tensors[i].dtype() == c10::ScalarType::Bool;
    });
    if (tensors.size() == set.size() && sums) result.push_back(std::move(tensors));
  }
  return result;
}

std::optional<Proposal> pointwise(const Call& call, const Linear& linear, std::vector<ReduceOp> kept) {
  for (const auto& result : call.schema->returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType &&
        result.type()->kind() != c10::TypeKind::ListType)
      return std::nullopt;
  }
  Shape shape;
  for (const Spec& spec : call.tensors) shape = at::infer_size(shape, spec.shape());
  Einsum einsum;
  const Letters all = identity(shape.size());
  einsum.outputs.assign(std::max<size_t>(1, call.schema->returns().size()), all);
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const Spec& spec = call.tensors[i];
    if (call.written[i] && spec.shape() != c10::IntArrayRef(shape) && call.schema->returns().size() == 1)
      return std::nullopt;
    einsum.inputs.push_back(broadcast(spec.shape(), shape, all));
  }
  einsum.linear = linear_tensors(call, linear);
  // With a number beside it, a function of two is not what it was.
  einsum.kept = std::move(kept);
  Result result{shape};
  // As the first input of that shape lies in memory.
  for (const Spec& spec : call.tensors) {
    if (spec.shape() != c10::IntArrayRef(shape)) continue;
    result.strides = dense_strides(spec);
    break;
  }
  return Proposal{rows(einsum), {std::move(result)}};
}

Rule any_pointwise() {
  Rule rule{"pointwise", [](const Call& call) { return pointwise(call); }};
  rule.takes_slices = true;
  rule.can_be_tried = true;
  return rule;
}

namespace {

/// An integer cannot be divided by zero.
Rule division() {
  Rule rule = any_pointwise();
  rule.checks_values_of = {"other"};
  return rule;
}

}  // namespace

Table pointwise_rules() {
  const Linear first{{0}};
  return tried({
      {{"add.Tensor", "sub.Tensor", "rsub.Tensor"},
       linear_rule("pointwise, linear in both at once", {{0, 1}}, /*integers=*/true)},
      {{"mul.Tensor"}, linear_rule("pointwise, linear in each", {{0}, {1}}, /*integers=*/true)},
      {{"neg"}, linear_rule("pointwise, linear in the first", first, /*integers=*/true)},
      {{"mul.Scalar", "div.Scalar", "div.Tensor", "deg2rad", "rad2deg"},
       linear_rule("pointwise, linear in the first", first)},
      {{"addcmul"},
       linear_rule("pointwise, linear in the sum and each factor", {{0, 1}, {0, 2}}, /*integers=*/true)},
      {{"addcdiv"}, linear_rule("pointwise, linear in the sum and the numerator", {{0, 1}})},
      {{"lerp.Scalar"}, linear_rule("pointwise, linear in both at once", {{0, 1}})},
      {{"where.self"}, linear_rule("pointwise, linear in both values at once", {{1, 2}}, /*integers=*/true)},
      {{"threshold_backward", "tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward",
        "native_dropout_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward",
        "leaky_relu_backward", "elu_backward", "softplus_backward", "mish_backward", "logit_backward",
        "softshrink_backward", "hardshrink_backward", "_masked_scale"},
       linear_rule("pointwise, linear in the gradient", first)},
      {{"relu", "exp", "tanh", "sigmoid", "floor", "ceil", "trunc", "expm1", "erf", "atan", "asinh", "sinh",
        "hardtanh", "hardsigmoid"},
       monotone()},
      {{"hardswish",
        "masked_fill.Scalar",
        "masked_fill.Tensor",
        "_add_relu.Tensor",
        "_prelu_kernel",
        "complex",
        "polar",
        "log_sigmoid_backward",
        "eq_.Tensor",
        "eq_.Scalar",
        "ne_.Tensor",
        "ne_.Scalar",
        "lt_.Tensor",
        "lt_.Scalar",
        "le_.Tensor",
        "le_.Scalar",
        "gt_.Tensor",
        "gt_.Scalar",
        "ge_.Tensor",
        "ge_.Scalar",
        "rrelu_with_noise_backward"},
       any_pointwise()},
      {{"floor_divide", "div.Tensor_mode", "div.Scalar_mode", "remainder.Tensor", "remainder.Scalar",
        "remainder.Scalar_Tensor", "fmod.Tensor", "fmod.Scalar"},
       division()},
      {{"log_sigmoid_forward"}, {"by min, log1p and exp", log_sigmoid}},
      {{"detach", "alias", "lift_fresh", "lift", "detach_"}, {"as it is", same}},
      {{"clone", "zero_", "_lazy_clone"}, {"as it is", copied, {"memory_format"}}},
      {{"_to_copy"}, {"pointwise; as it is if the dtype stays", cast, {"dtype", "memory_format"}}},
      {{"copy_"}, {"pointwise, linear in both at once if the dtype stays", copy}},
      {{"fill_.Scalar", "fill_.Tensor", "fill.Scalar", "fill.Tensor"}, {"pointwise", fill}},
      {{"_prelu_kernel_backward"}, {"pointwise, linear in the gradient", prelu_backward}},
      {{"equal"}, {"by eq and all", equal}},
      {{"allclose"}, {"by isclose and all", allclose}},
  });
}

}  // namespace tessera::rules
