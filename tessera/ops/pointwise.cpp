#include <tessera/ops/family.h>
#include <tessera/ops/plain_gradients.h>

#include <ATen/ATen.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

/// Whether the dtype has all values of the other, rounded if these are integers. No for small floats and wide
/// unsigned integers, which libtorch does not promote.
bool widens(at::ScalarType from, at::ScalarType to) {
  const auto is_promoted = [](at::ScalarType dtype) {
    if (at::isFloatingType(dtype)) return c10::elementSize(dtype) > 1;
    return at::isComplexType(dtype) ||
           (at::isIntegralType(dtype, /*includeBool=*/true) && !c10::isBarebonesUnsignedType(dtype));
  };
  return is_promoted(from) && is_promoted(to) && c10::promoteTypes(from, to) == to;
}

/// Sums stay partial if every part keeps its value, and with it the sum; extremes if the order is kept.
Pointwise cast_form(at::ScalarType from, at::ScalarType to) {
  const auto is_number = [](at::ScalarType dtype) {
    return at::isFloatingType(dtype) || at::isComplexType(dtype);
  };
  Pointwise form;
  if (is_number(from) && is_number(to) && widens(from, to)) form.linear = {{"self"}};
  // Integers that are too large for the new dtype wrap around, as do floating numbers that become integers, and these
  // become NaN in the smallest floating dtypes.
  const bool is_ordered = to != at::kBool && !at::isComplexType(from) && !at::isComplexType(to);
  const bool rounds = at::isFloatingType(from) && at::isFloatingType(to) && widens(from, at::kDouble) &&
                      widens(to, at::kDouble);
  if (is_ordered && (rounds || widens(from, to))) form.keeps = {ReduceOp::max, ReduceOp::min};
  return form;
}

std::optional<Strategies> cast(const OpCall& call) {
  const at::ScalarType from = call.tensors[0].dtype();
  const at::ScalarType to = call.has("dtype") ? call.value("dtype").toScalarType() : from;
  if (from == to) return propose(AsItIs{}, call);
  auto strategies = propose(cast_form(from, to), call);
  if (strategies) strategies->results[0].strides = new_strides(call);
  return strategies;
}

std::optional<Strategies> equal(const OpCall& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  Strategies strategies;
  if (call.tensors[0].shape() != call.tensors[1].shape()) {
    if (call.tensors[0].dtype() != call.tensors[1].dtype()) return std::nullopt;
    strategies.decompose = [](const c10::OperatorHandle&, Stack) { return Stack{false}; };
    return strategies;
  }
  strategies.decompose = [](const c10::OperatorHandle& op, Stack arguments) {
    const NamedArguments named(op, arguments);
    return Stack{at::all(at::eq(named.tensor("self"), named.tensor("other"))).item<bool>()};
  };
  return strategies;
}

/// other - alpha self.
std::optional<Strategies> reversed_difference(const OpCall& call) {
  Pointwise form{.linear = {{"self", "other"}}, .integers = true, .rises = {"other"}};
  const at::Scalar alpha = call.value("alpha").toScalar();
  if (!alpha.isComplex() && alpha.toDouble() > 0) form.falls = {"self"};
  if (!alpha.isComplex() && alpha.toDouble() < 0) form.rises.emplace_back("self");
  return propose(form, call);
}

Stack allclose(const c10::OperatorHandle& op, Stack arguments) {
  const NamedArguments named(op, arguments);
  const at::Tensor close = at::isclose(named.tensor("self"), named.tensor("other"), named["rtol"].toDouble(),
                                       named["atol"].toDouble(), named["equal_nan"].toBool());
  return {at::all(close).item<bool>()};
}

/// As libtorch computes it, where both results are of the input's shape.
Stack log_sigmoid(const c10::OperatorHandle&, Stack arguments) {
  const at::Tensor x = self_tensor(arguments);
  const at::Tensor buffer = at::exp(at::neg(at::abs(x)));
  return {at::sub(at::clamp_max(x, 0), at::log1p(buffer)), buffer};
}

}  // namespace

Rule any_pointwise() {
  Rule rule = Pointwise{};
  rule.takes_slices = true;
  rule.can_be_tried = true;
  return rule;
}

namespace {

std::vector<std::string> prims(std::vector<std::string> names) {
  for (std::string& name : names) name = "prims::" + name;
  return names;
}

Rule division() {
  Rule rule = any_pointwise();
  rule.divides_by = "other";
  return rule;
}

}  // namespace

Table pointwise_rules() {
  // What reducing equal values leaves as it is.
  const std::vector<ReduceOp> equal_values{ReduceOp::avg, ReduceOp::min, ReduceOp::max};
  return tried({
      {{"add.Tensor", "sub.Tensor"},
       Pointwise{.linear = {{"self", "other"}}, .integers = true, .rises = {"self"}}},
      {{"rsub.Tensor", "rsub.Scalar"},
       {"pointwise, linear in `self` and `other` together; keeps P(max) and P(min)",
        reversed_difference,
        {"alpha"},
        "whether it falls with `self` depends on the sign of `alpha`"}},
      {{"add.Scalar", "sub.Scalar"}, Pointwise{.rises = {"self"}}},
      {{"maximum", "clamp_min.Tensor"}, Pointwise{.rises = {"self", "other", "min"}, .joins = ReduceOp::max}},
      {{"minimum", "clamp_max.Tensor"}, Pointwise{.rises = {"self", "other", "max"}, .joins = ReduceOp::min}},
      {{"logaddexp", "logaddexp2"}, Pointwise{.rises = {"self", "other"}}},
      {{"erfc", "special_erfcx"}, Pointwise{.falls = {"self"}}},
      {{"mul.Tensor"}, Pointwise{.linear = {{"self"}, {"other"}}, .integers = true}},
      {{"neg"}, Pointwise{.linear = {{"self"}}, .integers = true, .falls = {"self"}}},
      {{"mul.Scalar", "div.Scalar", "div.Tensor", "_masked_scale"}, Pointwise{.linear = {{"self"}}}},
      {{"deg2rad", "rad2deg"}, Pointwise{.linear = {{"self"}}, .rises = {"self"}}},
      {{"addcmul"}, Pointwise{.linear = {{"self", "tensor1"}, {"self", "tensor2"}}, .integers = true}},
      {{"addcdiv"}, Pointwise{.linear = {{"self", "tensor1"}}}},
      {{"lerp.Scalar"}, Pointwise{.linear = {{"self", "end"}}}},
      {{"where.self"}, Pointwise{.linear = {{"self", "other"}}, .integers = true}},
      {{"threshold_backward", "tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward",
        "native_dropout_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward",
        "leaky_relu_backward", "elu_backward", "softplus_backward", "mish_backward", "logit_backward",
        "softshrink_backward", "_prelu_kernel_backward"},
       Pointwise{.linear = {{"grad_output"}}}},
      {{"rrelu_with_noise_backward"}, composed({"mul", "leaky_relu_backward"})},
      {{"complex"}, Pointwise{.linear = {{"real", "imag"}}}},
      {{"hardshrink_backward"}, Pointwise{.linear = {{"grad_out"}}}},
      {{"relu",  "exp",   "tanh",           "sigmoid",    "floor",     "ceil",     "trunc",
        "expm1", "erf",   "atan",           "asinh",      "sinh",      "hardtanh", "hardsigmoid",
        "exp2",  "round", "round.decimals", "hardshrink", "clamp_min", "clamp_max"},
       Pointwise{.keeps = {ReduceOp::max, ReduceOp::min}}},
      {{"hardswish",  "masked_fill.Scalar",   "masked_fill.Tensor", "_prelu_kernel",
        "polar",      "log_sigmoid_backward", "eq_.Tensor",         "eq_.Scalar",
        "ne_.Tensor", "ne_.Scalar",           "lt_.Tensor",         "lt_.Scalar",
        "le_.Tensor", "le_.Scalar",           "gt_.Tensor",         "gt_.Scalar",
        "ge_.Tensor", "ge_.Scalar",           "_add_relu.Scalar",   "_add_relu.Tensor"},
       Pointwise{}},
      {{"floor_divide", "floor_divide.Scalar", "div.Tensor_mode", "div.Scalar_mode", "remainder.Tensor",
        "remainder.Scalar", "remainder.Scalar_Tensor", "fmod.Tensor", "fmod.Scalar"},
       division()},
      {{"log_sigmoid_forward"}, Decomposition{{"clamp_max", "exp", "log1p"}, log_sigmoid}},
      {prims({"bessel_i0e",  "bessel_i1",
              "bessel_i1e",  "bessel_j0",
              "bessel_j1",   "erfcx",
              "ndtri",       "spherical_bessel_j0",
              "gcd",         "ne",
              "abs",         "acos",
              "acosh",       "asin",
              "asinh",       "atan",
              "atanh",       "cos",
              "cosh",        "ceil",
              "digamma",     "erf",
              "erf_inv",     "erfc",
              "exp",         "exp2",
              "expm1",       "floor",
              "isfinite",    "lgamma",
              "log",         "log1p",
              "log2",        "log10",
              "reciprocal",  "round",
              "rsqrt",       "sign",
              "signbit",     "sin",
              "sinh",        "sqrt",
              "tan",         "tanh",
              "trunc",       "neg",
              "bitwise_not", "add",
              "sub",         "mul",
              "atan2",       "bitwise_and",
              "bitwise_or",  "bitwise_xor",
              "eq",          "ge",
              "gt",          "le",
              "lt",          "fmax",
              "fmin",        "hypot",
              "igamma",      "igammac",
              "maximum",     "minimum",
              "nextafter",   "pow",
              "shift_left",  "shift_right_arithmetic",
              "zeta",        "where",
              "frexp",       "cbrt"}),
       any_pointwise()},
      {prims({"div", "fmod", "remainder"}), division()},
      {{"detach", "alias", "lift_fresh", "lift", "detach_", "prims::view_of"}, AsItIs{.is_view = true}},
      {{"clone", "zero_", "_lazy_clone"}, AsItIs{}},
      {{"_to_copy"},
       {"as it is if the dtype stays, else pointwise; linear in `self` if the dtype widens, keeps P(max) and "
        "P(min) "
        "if the order stays",
        cast,
        {"dtype", "memory_format"},
        "what it is depends on the dtype it is given"}},
      {{"copy_"}, Pointwise{.linear = {{"self", "src"}}, .same_dtype = true}},
      {{"fill_.Scalar", "fill_.Tensor", "fill.Scalar", "fill.Tensor"}, Pointwise{.keeps = equal_values}},
      {{"equal"}, {"by eq and all", equal, {}, "of other shapes, the answer is known without data"}},
      {{"allclose"}, Decomposition{{"isclose", "all"}, allclose}},
  });
}

}  // namespace tessera::ops

// --- autograd

namespace tessera {

namespace {

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  distribute_gradients(library, {"_prelu_kernel_backward", "copysign.Tensor", "copysign_.Tensor", "nextafter",
                                 "nextafter_", "sgn"});
}

}  // namespace

}  // namespace tessera
