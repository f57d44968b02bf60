#include <tessera/rules/family.h>

namespace tessera::rules {

namespace {

Rule items(std::string text, Linear linear = {}) {
  Rule rule{std::move(text), [linear](const Call& call) { return pointwise(call, linear); }};
  rule.itemwise = true;
  return rule;
}

/// Norms that ranks without elements know too.
std::optional<Proposal> finite_norm(const Call& call) {
  const double p = call.value("ord").toScalar().toDouble();
  if (!(p >= 0 && p < 1e300)) return std::nullopt;
  static const Rule norm = norm_rule("ord");
  return norm.propose(call);
}

std::vector<std::string> foreach (const std::vector<std::string>& names,
                                  const std::vector<std::string>& overloads) {
  std::vector<std::string> result;
  for (const std::string& name : names) {
    for (const std::string& overload : overloads)
      result.push_back("_foreach_" + name + (overload.empty() ? "" : "." + overload));
  }
  return result;
}

}  // namespace

Table list_rules() {
  const std::string pointwise = "item by item, pointwise";
  Rule norm{"item by item, P(norm p)", finite_norm, {"ord", "dtype"}};
  norm.itemwise = true;
  return {
      {foreach ({"add", "sub"}, {"List"}), items(pointwise + ", linear in both at once", {{0, 1}})},
      {foreach ({"mul"}, {"List"}), items(pointwise + ", linear in each", {{0}, {1}})},
      {foreach ({"mul", "div"}, {"Scalar", "ScalarList", "Tensor"}), items(pointwise + ", linear", {{0}})},
      {foreach ({"neg", "zero", "clone"}, {""}), items(pointwise + ", linear", {{0}})},
      {foreach ({"lerp"}, {"Scalar", "ScalarList"}), items(pointwise + ", linear in both at once", {{0, 1}})},
      {foreach ({"addcmul"}, {"Scalar", "ScalarList", "Tensor"}),
       items(pointwise + ", linear in the sum and each factor", {{0, 1}, {0, 2}})},
      {foreach ({"addcdiv"}, {"Scalar", "ScalarList", "Tensor"}),
       items(pointwise + ", linear in the sum and the numerator", {{0, 1}})},
      {foreach ({"add"}, {"Scalar", "ScalarList", "Tensor"}), items(pointwise)},
      {foreach ({"sub"}, {"Scalar", "ScalarList"}), items(pointwise)},
      {foreach ({"div", "lerp"}, {"List"}), items(pointwise)},
      {foreach ({"pow", "maximum", "minimum", "clamp_min", "clamp_max"}, {"List", "Scalar", "ScalarList"}),
       items(pointwise)},
      {{"_foreach_pow.ScalarAndTensor", "_foreach_copy", "_foreach_copy_"}, items(pointwise)},
      {foreach (
           {"abs",   "acos",    "asin", "atan",   "ceil", "cos",   "cosh",  "erf",  "erfc",       "exp",
            "expm1", "floor",   "frac", "lgamma", "log",  "log10", "log1p", "log2", "reciprocal", "round",
            "rsqrt", "sigmoid", "sign", "sin",    "sinh", "sqrt",  "tan",   "tanh", "trunc"},
           {""}),
       items(pointwise)},
      {{"_foreach_norm.Scalar"}, norm},
      {{"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_",
        "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"},
       items(pointwise)},
  };
}

}  // namespace tessera::rules
