#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/kernels/embedding_rows.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/as_one.h>
#include <tessera/ops/family.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_embedding_bag.h>
#include <ATen/ops/_embedding_bag_backward.h>
#include <ATen/ops/_embedding_bag_ops.h>
#include <ATen/ops/_embedding_bag_per_sample_weights_backward.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_backward.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/embedding_ops.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

/// Embeddings and bags of them. In the patterns, x are the rows of the weight and y its columns.
namespace tessera::ops {

namespace {

using RowKernel = Stack (*)(const Spec& weight, const c10::OperatorHandle& op, Stack arguments);

/// A kernel for ranks that hold some of the rows. `always`: also for one that holds all of them, of operators
/// without a kernel of their own.
Rule with_row_kernel(Form form, const char* text, RowKernel kernel, bool always = false) {
  Rule rule(std::move(form), {"mode"});
  rule.local.text = text;
  rule.local.of = [=](const OpCall& call) -> Localize {
    const bool is_largest = call.position("mode") && call.integer("mode") == kMax;
    return [=, index = *call.tensor("weight")](const ChosenSpecs& chosen) {
      const Spec& weight = chosen.inputs[index];
      if (!always && mesh_dims_of(weight, 0).empty()) return LocalCall();
      LocalCall local;
      local.communicates = is_largest && !mesh_dims_of(weight, 0).empty();
      local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
        return kernel(weight, op, std::move(arguments));
      };
      return local;
    };
  };
  return rule;
}

/// How often an index occurs is known only to who has all of them.
Cases unless_scaled(Pattern pattern) {
  Pattern scaled = pattern;
  scaled.contracted = std::nullopt;
  return {"scale_grad_by_freq", {{"false", false, std::move(pattern)}, {"true", true, std::move(scaled)}}};
}

/// By the mode of bags: sums and means, which are linear in an argument, and the largest.
Cases by_mode(Pattern sums, Pattern largest) {
  return {"mode", {{"sum", kSum, sums}, {"mean", kMean, sums}, {"max", kMax, std::move(largest)}}};
}

Cases bag() {
  return by_mode(
      {.letters = {"xy,.,.,.?->.y,=.,=.,=."}, .linear = {{"weight"}}, .contiguous = "x", .never_empty = true},
      {.letters = {"xy,.,.,.?->.y,=.,=.,.y"},
       .contracted = Replicate(),
       .contiguous = "x",
       .never_empty = true});
}

Cases bag_backward(const char* sums, const char* largest) {
  Pattern pattern{.letters = {sums}, .linear = {{"grad"}}, .unless = {"sparse"}};
  Pattern of_largest = pattern;
  of_largest.letters = {largest};
  return by_mode(std::move(pattern), std::move(of_largest));
}

}  // namespace

Table embedding_rules() {
  return {
      {{"embedding"},
       with_row_kernel(Pattern{.letters = {"xy,B->By"}, .linear = {{"weight"}}, .contiguous = "x"},
                       "zeros for rows of other ranks", embedding_of_local_rows)},
      {{"embedding_dense_backward"},
       unless_scaled({.letters = {"By,B->.y"}, .linear = {{"grad_output"}}, .broadcasts = false})},
      {{"tessera::embedding_backward"},
       with_row_kernel(
           unless_scaled(
               {.letters = {"By,B,xy->xy"}, .linear = {{"grad"}}, .contiguous = "x", .broadcasts = false}),
           "of local rows", gradient_of_local_rows)},
      {{"_embedding_bag", "_embedding_bag_forward_only"},
       with_row_kernel(bag(), "of local rows, the largest by two reductions", bags_of_local_rows)},
      {{"_embedding_bag_backward"}, bag_backward(".y,.,.,.,.,..,.?->.y", ".y,.,.,.,.,.y,.?->.y")},
      {{"_embedding_bag_dense_backward"}, bag_backward(".y,.,.,.,..,.?->.y", ".y,.,.,.,.y,.?->.y")},
      {{"tessera::embedding_bag_backward"},
       with_row_kernel(Pattern{.letters = {".y,.,.,.,.?,xy->xy"}, .linear = {{"grad"}}, .contiguous = "x"},
                       "of local rows", bag_gradient_of_local_rows, /*always=*/true)},
      {{"_embedding_bag_per_sample_weights_backward"},
       with_row_kernel(Pattern{.letters = {".y,xy,.,.,.->."},
                               .linear = {{"grad"}, {"weight"}},
                               .contiguous = "x",
                               .never_empty = true},
                       "of local rows", sample_weight_gradient_of_local_rows)},
  };
}

}  // namespace tessera::ops

// --- autograd

/// Embedding weights whose rows are sharded: each rank makes the gradient of its own rows alone. libtorch's formula knows
/// how many rows there are, but not who has them, so that each rank would make that of all.
namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool has_sharded_rows(const at::Tensor& weight) {
  const DTensorImpl* impl = DTensorImpl::of(weight);
  if (!impl) return false;
  const Placements& placements = impl->spec().placements();
  return std::any_of(placements.begin(), placements.end(),
                     [](const Placement& placement) { return placement.is_shard_like(0); });
}

at::Tensor gradient_of_weight(const at::Tensor& gradient, const at::Tensor& indices, const at::Tensor& weight,
                              int64_t padding, bool scales) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tessera::embedding_backward", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, bool)>();
  return op.call(gradient, indices, weight, padding, scales);
}

struct ShardedRows : torch::autograd::Function<ShardedRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices,
                            int64_t padding, bool scales) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({weight, indices});
    context->saved_data["padding"] = padding;
    context->saved_data["scales"] = scales;
    return at::embedding(weight, indices, padding, scales);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &weight = saved[0], &indices = saved[1], &gradient = gradients[0];
    const int64_t padding = context->saved_data["padding"].toInt();
    const bool scales = context->saved_data["scales"].toBool();
    // A gradient that is itself to have one is left to libtorch's formula.
    const at::Tensor result =
        at::GradMode::is_enabled()
            ? at::embedding_backward(gradient, indices, weight.size(0), padding, scales, /*sparse=*/false)
            : gradient_of_weight(gradient, indices, weight, padding, scales);
    return {result, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

/// The same of sums and means of rows. The largest ones are left to libtorch's formula.
struct BagsOfShardedRows : torch::autograd::Function<BagsOfShardedRows> {
  static variable_list forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices,
                               const at::Tensor& offsets, bool scales, int64_t mode,
                               const std::optional<at::Tensor>& weights, bool ends, int64_t padding) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [bags, bag_of_index, sizes, largest] =
        at::_embedding_bag(weight, indices, offsets, scales, mode, /*sparse=*/false, weights, ends, padding);
    context->save_for_backward(
        {weight, indices, offsets, weights.value_or(at::Tensor()), bag_of_index, sizes, largest});
    context->saved_data["scales"] = scales;
    context->saved_data["mode"] = mode;
    context->saved_data["padding"] = padding;
    context->mark_non_differentiable({bag_of_index, sizes, largest});
    return {bags, bag_of_index, sizes, largest};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &weight = saved[0], &indices = saved[1], &offsets = saved[2], &weights = saved[3],
                     &bag_of_index = saved[4], &sizes = saved[5], &largest = saved[6],
                     &gradient = gradients[0];
    const bool scales = context->saved_data["scales"].toBool();
    const int64_t mode = context->saved_data["mode"].toInt(),
                  padding = context->saved_data["padding"].toInt();
    variable_list result(8);
    if (weight.requires_grad()) {
      static const auto op = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("tessera::embedding_bag_backward", "")
                                 .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                   const at::Tensor&, const std::optional<at::Tensor>&,
                                                   const at::Tensor&, bool, int64_t, int64_t)>();
      result[0] =
          at::GradMode::is_enabled()
              ? at::_embedding_bag_backward(gradient, indices, offsets, bag_of_index, sizes, largest,
                                            weight.size(0), scales, mode, /*sparse=*/false, weights, padding)
              : op.call(gradient, indices, offsets, sizes, weights, weight, scales, mode, padding);
    }
    if (weights.defined() && weights.requires_grad())
      result[5] = at::_embedding_bag_per_sample_weights_backward(gradient, weight, indices, offsets,
                                                                 bag_of_index, mode, padding);
    return result;
  }
};

using Bags = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
constexpr int64_t kLargest = 2;

Bags embedding_bag(c10::DispatchKeySet keys, const at::Tensor& weight, const at::Tensor& indices,
                   const at::Tensor& offsets, bool scales, int64_t mode, bool sparse,
                   const std::optional<at::Tensor>& weights, bool ends, int64_t padding) {
  if (sparse || mode == kLargest || !at::GradMode::is_enabled() || !weight.requires_grad() ||
      !has_sharded_rows(weight) || has_tangent(weight))
    return as_one<at::_ops::_embedding_bag>(keys, weight, indices, offsets, scales, mode, sparse, weights,
                                            ends, padding);
  const variable_list results =
      BagsOfShardedRows::apply(weight, indices, offsets, scales, mode, weights, ends, padding);
  return {results[0], results[1], results[2], results[3]};
}

at::Tensor embedding(c10::DispatchKeySet keys, const at::Tensor& weight, const at::Tensor& indices,
                     c10::SymInt padding, bool scales, bool sparse) {
  if (sparse || !at::GradMode::is_enabled() || !weight.requires_grad() || !has_sharded_rows(weight) ||
      has_tangent(weight))
    return as_one<at::_ops::embedding>(keys, weight, indices, padding, scales, sparse);
  return ShardedRows::apply(weight, indices, padding.expect_int(), scales);
}

/// Of the local shard of the weight; its rule is with those of embeddings.
at::Tensor embedding_backward(const at::Tensor& gradient, const at::Tensor& indices, const at::Tensor& weight,
                              int64_t padding, bool scales) {
  return at::embedding_dense_backward(gradient, indices, weight.size(0), padding, scales);
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def(
      "embedding_backward(Tensor grad, Tensor indices, Tensor weight, int padding_idx, bool "
      "scale_grad_by_freq) "
      "-> Tensor");
  library.impl("embedding_backward", c10::DispatchKey::CPU, embedding_backward);
  library.impl("embedding_backward", c10::DispatchKey::CUDA, embedding_backward);
  // On distributed tensors alone: by its rule.
  library.def(
      "embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor bag_size, Tensor? "
      "per_sample_weights, Tensor weight, bool scale_grad_by_freq, int mode, int padding_idx) -> Tensor");
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  library.impl("embedding", embedding);
  library.impl("_embedding_bag", embedding_bag);
}

}  // namespace

}  // namespace tessera
