#include <tessera/comm/collectives.h>
#include <tessera/rules/exchange.h>
#include <tessera/rules/family.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

Rule items(std::string text, Linear linear = {}) {
  Rule rule{std::move(text), [linear](const Call& call) { return pointwise(call, linear); }};
  rule.itemwise = true;
  return rule;
}

/// Norms of items; those of items of which a rank holds nothing are the neutral element.
Rule norms() {
  Rule rule{"item by item, P(norm p); P(max), P(min), P(sum) for infinite and zero p",
            [norm = norm_rule("ord")](const Call& call) {
              auto proposal = norm.propose(call);
              if (proposal) proposal->localize = {};
              return proposal;
            },
            {"ord", "dtype"}};
  rule.itemwise = true;
  rule.together = [](const Call& call) {
    Local local;
    const double p = call.value("ord").toScalar().toDouble();
    const bool lacks = std::any_of(call.tensors.begin(), call.tensors.end(), [](const Spec& spec) {
      return c10::multiply_integers(spec.local_shape()) == 0;
    });
    if (!lacks || (p >= 0 && !std::isinf(p))) return local;
    local.compute = [neutral = p > 0 ? 0 : std::numeric_limits<double>::infinity()](
                        const c10::OperatorHandle& op, Stack arguments) {
      std::vector<at::Tensor> items = arguments[0].toTensorVector();
      for (at::Tensor& item : items) {
        if (item.numel() == 0) item = at::full({1}, neutral, item.options());
      }
      arguments[0] = std::move(items);
      return call_operator(op, std::move(arguments));
    };
    return local;
  };
  return rule;
}

/// Each rank looks at what it holds; then all have to agree.
Rule unscale() {
  Rule rule = items("item by item, pointwise; what was found by one reduction for each mesh");
  rule.together = [](const Call& call) {
    std::vector<DeviceMesh> meshes;
    for (const size_t i : c10::irange(call.tensors.size())) {
      const DeviceMesh& mesh = call.tensors[i].mesh();
      const bool is_item = call.positions[i] == 0;
      if (is_item && mesh.size() > 1 && std::find(meshes.begin(), meshes.end(), mesh) == meshes.end())
        meshes.push_back(mesh);
    }
    // What is found on a part of a larger mesh is to be known on all of that.
    std::stable_sort(meshes.begin(), meshes.end(),
                     [](const DeviceMesh& a, const DeviceMesh& b) { return a.size() < b.size(); });
    Local local;
    local.communicates = !meshes.empty();
    local.compute = [meshes](const c10::OperatorHandle& op, Stack arguments) {
      const at::Tensor found = arguments[1].toTensor(), here = at::zeros_like(found);
      arguments[1] = here;
      op.callBoxed(arguments);
      for (const DeviceMesh& mesh : meshes) {
        std::vector<int64_t> all(mesh.ndim());
        std::iota(all.begin(), all.end(), 0);
        comm::all_reduce(here, c10d::ReduceOp::MAX, group_of(mesh, all)).wait();
      }
      found.copy_(at::maximum(found, here));
      return Stack{};
    };
    return local;
  };
  return rule;
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
      {{"_foreach_norm.Scalar"}, norms()},
      {{"_amp_foreach_non_finite_check_and_unscale_"}, unscale()},
      {{"_amp_update_scale_"}, items("numbers")},
      {{"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_",
        "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"},
       items(pointwise)},
  };
}

}  // namespace tessera::rules
