#include <tessera/kernels/exchange.h>
#include <tessera/kernels/order.h>
#include <tessera/ops/composites.h>
#include <tessera/ops/family.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

/// Along reduced dims, which the ranks reduce together where they are sharded.
Rule together(size_t results, Collective collective) {
  Reduction form;
  form.results = results;
  form.collective = std::move(collective);
  return form;
}

/// The results from the first values along a dim and their global indices.
using Finish = std::function<Stack(const ValuesAndIndices&)>;

/// Where `dim` is sharded: each rank's first ones, `each` at the most, and the first of these. Nothing where
/// that moves as much as there is.
Localize by_candidates(const OpCall& call, int64_t dim, int64_t each, const First& first,
                       const Finish& finish) {
  const Spec& x = call.tensors[0];
  if (each * x.mesh().size() >= x.shape()[dim]) return {};
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[0];
    const std::vector<int64_t> mesh_dims = mesh_dims_of(x, dim);
    if (mesh_dims.empty()) return local;
    local.communicates = true;
    local.compute = [=, ranks = ShardGroup(x, mesh_dims, dim), offset = x.global_offset()[dim]](
                        const c10::OperatorHandle&, Stack arguments) {
      return finish(first_of_all(self_tensor(arguments), ranks, dim, offset, each, first));
    };
    return local;
  };
}

const char* const kByCandidates = "each rank's first, and the first of these";

Rule topk() {
  const auto candidates = [](const OpCall& call, const Shape& dims) {
    const int64_t dim = dims[0], k = call.integer("k");
    const bool largest = call.flag("largest"), sorted = call.flag("sorted");
    const First first = [=](const at::Tensor& x) {
      const auto [values, indices] = at::topk(x, std::min(k, x.size(dim)), dim, largest, sorted);
      return ValuesAndIndices(values, indices);
    };
    return by_candidates(call, dim, k, first, [](const ValuesAndIndices& found) {
      return Stack{found.first, found.second};
    });
  };
  return {UnshardedDims{.dims = {"dim"},
                        .results = 2,
                        .same_size = false,
                        .collective = Collective{.text = kByCandidates, .of = candidates}},
          {"k", "largest", "sorted"}};
}

/// The index of the largest or smallest of all elements.
Localize extreme_of_all(const OpCall& call, Extreme extreme) {
  const Shape shape(call.flag("keepdim") ? call.tensors[0].ndim() : 0, 1);
  return [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[0];
    if (!x.is_sharded()) return local;
    local.communicates = true;
    local.compute = [=, ranks = ShardGroup(x, mesh_dims_of(x), 0)](const c10::OperatorHandle&,
                                                                   Stack arguments) {
      return Stack{index_of_extreme(self_tensor(arguments), x, ranks, extreme).view(shape)};
    };
    return local;
  };
}

/// The largest or the smallest along a dim, and its index, or only that.
enum class Gives { values_and_indices, indices };

Rule extreme_rule(Extreme extreme, Gives gives) {
  const auto candidates = [=](const OpCall& call, const Shape& dims) {
    if (!call.has("dim")) return extreme_of_all(call, extreme);
    const int64_t dim = dims[0];
    const First first = [=](const at::Tensor& x) {
      const auto [values, indices] =
          extreme == Extreme::largest ? at::max(x, dim, true) : at::min(x, dim, true);
      return ValuesAndIndices(values, indices);
    };
    return by_candidates(call, dim, 1, first,
                         [=, keep = call.flag("keepdim")](const ValuesAndIndices& found) {
                           const auto result = [&](const at::Tensor& x) { return keep ? x : x.squeeze(dim); };
                           return gives == Gives::indices ? Stack{result(found.second)}
                                                          : Stack{result(found.first), result(found.second)};
                         });
  };
  return together(gives == Gives::indices ? 1 : 2, {.text = kByCandidates, .of = candidates});
}

/// The median of all elements.
Rule median_rule(Nan nan) {
  const auto counted = [nan](const OpCall& call, const Shape&) -> Localize {
    const Spec& spec = call.tensors[0];
    // Where all of it takes less than to count, it is gathered.
    constexpr int64_t kSmall = int64_t{1} << 16;
    if (spec.numel() * static_cast<int64_t>(c10::elementSize(spec.dtype())) <= kSmall) return {};
    return [nan](const ChosenSpecs& chosen) {
      LocalCall local;
      const Spec& x = chosen.inputs[0];
      if (!x.is_sharded()) return local;
      local.communicates = true;
      local.compute = [=, group = group_of(x.mesh(), mesh_dims_of(x)), count = x.numel()](
                          const c10::OperatorHandle&, Stack arguments) {
        return Stack{median(self_tensor(arguments), count, nan, group)};
      };
      return local;
    };
  };
  return together(1,
                  {.text = "by counting values of some bits at a time", .of = counted, .contiguous = false});
}

/// How many boundaries are below, which counts in each shard of these.
std::optional<Strategies> bucketize(const OpCall& call) {
  auto strategies = propose(Pattern{{"B,n->B"}}, call);
  if (strategies && call.tensors.size() == 2)
    strategies->options.push_back({{Partial(ReduceOp::max), Replicate()}, {Partial(ReduceOp::max)}});
  return strategies;
}

}  // namespace

Table sort_rules() {
  return tried({
      {{"sort", "sort.stable"}, UnshardedDims{.dims = {"dim"}, .results = 2, .keeps_strides = true}},
      {{"topk"}, topk()},
      {{"max.dim"}, extreme_rule(Extreme::largest, Gives::values_and_indices)},
      {{"min.dim"}, extreme_rule(Extreme::smallest, Gives::values_and_indices)},
      {{"argmax"}, extreme_rule(Extreme::largest, Gives::indices)},
      {{"argmin"}, extreme_rule(Extreme::smallest, Gives::indices)},
      {{"median"}, median_rule(Nan::propagates)},
      {{"nanmedian"}, median_rule(Nan::ignored)},
      {{"bucketize.Tensor"},
       {"`B,n->B`; keeps P(max) of `self`",
        bucketize,
        {},
        "NaN is above all boundaries: P(max) stays, P(min) does not"}},
      {{"searchsorted.Tensor"}, Pattern{.letters = {".,B,.?->B", "B.,Bk,B.?->Bk"}, .broadcasts = false}},
      {{"glu"}, UnshardedDims{.dims = {"dim"}, .same_size = false}},
      {{"glu_backward"}, UnshardedDims{.dims = {"dim"}, .same_size = false, .linear = {{"grad_output"}}}},
  });
}

}  // namespace tessera::ops

// --- autograd and composites

namespace tessera {

namespace {

/// libtorch makes the zeros that this begins with as a plain tensor.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, int64_t dim, const at::Tensor& indices,
                                              c10::SymIntArrayRef sizes, bool keepdim) {
  const bool is_reduced = !keepdim && !sizes.empty();
  const at::Tensor zeros = grad.new_zeros_symint(sizes);
  return is_reduced ? zeros.scatter(dim, indices.unsqueeze(dim), grad.unsqueeze(dim))
                    : zeros.scatter(dim, indices, grad);
}

void register_sort_composites(torch::Library& library) {
  register_composed(library, {"nanquantile", "nanquantile.scalar", "quantile", "quantile.scalar"});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_sort_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  register_sort_composites(library);
  library.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
}

}  // namespace

}  // namespace tessera
