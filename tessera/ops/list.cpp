#include <tessera/kernels/extremes.h>
#include <tessera/ops/family.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

/// One item of each list.
Rule itemwise(Pointwise form) {
  Rule rule = std::move(form);
  rule.itemwise = true;
  return rule;
}

Rule items(std::vector<Names> linear = {}, bool integers = false) {
  return itemwise(Pointwise{.linear = std::move(linear), .integers = integers});
}

/// Sums of powers of items.
Rule powers() {
  Rule rule = Norm{.order = "ord", .powers = true};
  rule.itemwise = true;
  return rule;
}

/// Norms of items; those of items of which a rank has nothing are the neutral element.
Rule norms() {
  Rule rule = Norm{"ord"};
  rule.itemwise = true;
  rule.local.of = [](const OpCall&) { return Localize(); };  // `together`
  rule.together = [](const OpCall& call) {
    LocalCall local;
    const double p = call.value("ord").toScalar().toDouble();
    const bool lacks = std::any_of(call.tensors.begin(), call.tensors.end(), [](const Spec& spec) {
      return c10::multiply_integers(spec.local_shape()) == 0;
    });
    if (!lacks || (p >= 0 && !std::isinf(p))) return local;
    local.compute = [neutral = p > 0 ? 0 : std::numeric_limits<double>::infinity()](
                        const c10::OperatorHandle& op, Stack arguments) {
      c10::IValue& self = NamedArguments(op, arguments)["self"];
      std::vector<at::Tensor> items = self.toTensorVector();
      for (at::Tensor& item : items) {
        if (item.numel() == 0) item = at::full({1}, neutral, item.options());
      }
      self = std::move(items);
      return call_operator(op, std::move(arguments));
    };
    return local;
  };
  return rule;
}

/// Each rank looks at its shards; then all have to agree.
Rule unscale() {
  Rule rule = items();
  rule.local.text = "what ranks found: one all-reduce for each mesh";
  rule.together = [](const OpCall& call) {
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
    LocalCall local;
    local.communicates = !meshes.empty();
    local.compute = [meshes](const c10::OperatorHandle& op, Stack arguments) {
      c10::IValue& argument = NamedArguments(op, arguments)["found_inf"];
      const at::Tensor found = argument.toTensor(), here = at::zeros_like(found);
      argument = here;
      op.callBoxed(arguments);
      for (const DeviceMesh& mesh : meshes) {
        std::vector<int64_t> all(mesh.ndim());
        std::iota(all.begin(), all.end(), 0);
        max_over_ranks(here, mesh, all);
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
  constexpr bool kIntegers = true;
  return {
      {foreach ({"add", "sub"}, {"List"}),
       itemwise(Pointwise{.linear = {{"self", "other"}}, .integers = true, .rises = {"self"}})},
      {foreach ({"mul"}, {"List"}), items({{"self"}, {"other"}}, kIntegers)},
      {foreach ({"mul", "div"}, {"Scalar", "ScalarList", "Tensor"}), items({{"self"}})},
      {foreach ({"zero", "clone"}, {""}), items({{"self"}}, kIntegers)},
      {foreach ({"neg"}, {""}),
       itemwise(Pointwise{.linear = {{"self"}}, .integers = true, .falls = {"self"}})},
      {foreach ({"lerp"}, {"Scalar", "ScalarList"}), items({{"self", "tensors1"}})},
      {foreach ({"addcmul"}, {"Scalar", "ScalarList", "Tensor"}),
       items({{"self", "tensor1"}, {"self", "tensor2"}})},
      {foreach ({"addcdiv"}, {"Scalar", "ScalarList", "Tensor"}), items({{"self", "tensor1"}})},
      {foreach ({"add"}, {"Scalar", "ScalarList", "Tensor"}), items()},
      {foreach ({"sub"}, {"Scalar", "ScalarList"}), items()},
      {foreach ({"div", "lerp"}, {"List"}), items()},
      {foreach ({"pow"}, {"List", "Scalar", "ScalarList"}), items()},
      {foreach ({"maximum", "clamp_min"}, {"List", "Scalar", "ScalarList"}),
       itemwise(Pointwise{.rises = {"self", "other"}, .joins = ReduceOp::max})},
      {foreach ({"minimum", "clamp_max"}, {"List", "Scalar", "ScalarList"}),
       itemwise(Pointwise{.rises = {"self", "other"}, .joins = ReduceOp::min})},
      {{"_foreach_pow.ScalarAndTensor", "_foreach_copy", "_foreach_copy_"}, items()},
      {foreach ({"abs", "acos", "asin", "cos", "cosh", "frac", "lgamma", "log", "log10", "log1p", "log2",
                 "reciprocal", "rsqrt", "sign", "sin", "sqrt", "tan"},
                {""}),
       items()},
      {foreach ({"atan", "ceil", "erf", "exp", "expm1", "floor", "round", "sigmoid", "sinh", "tanh", "trunc"},
                {""}),
       itemwise(Pointwise{.rises = {"self"}})},
      {foreach ({"erfc"}, {""}), itemwise(Pointwise{.falls = {"self"}})},
      {{"_foreach_norm.Scalar"}, norms()},
      {{"_foreach_powsum.Scalar"}, powers()},
      {{"_amp_foreach_non_finite_check_and_unscale_"}, unscale()},
      {{"_amp_update_scale_"}, items()},
      {{"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_",
        "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr"},
       items()},
  };
}

}  // namespace tessera::ops
