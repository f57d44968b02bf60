#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/kernels/indices.h>
#include <tessera/ops/as_one.h>
#include <tessera/ops/family.h>
#include <tessera/ops/select.h>

#include <algorithm>
#include <string>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/index_ops.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

/// Operators with indices. Where the dim that is indexed is sharded, a rank reads and writes what it holds of
/// it; nothing is communicated.
namespace tessera::ops {

namespace {

/// Whether libtorch raises an IndexError if an index of the operator is out of range.
bool has_index_error(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  const auto begins = [&](std::string_view prefix) { return name.rfind(prefix, 0) == 0; };
  return !begins("aten::gather") && !begins("aten::scatter") && !begins("aten::index_add");
}

/// What is read where the dim is sharded: by the rank that holds it; the others have zeros there.
Placement selected(const Spec& spec) {
  return Partial(spec.dtype() == c10::ScalarType::Bool ? ReduceOp::any : ReduceOp::sum);
}

/// The argument `index`, or the one index of the list `indices`.
at::Tensor index_of(const NamedArguments& arguments) {
  if (!arguments.has("indices")) return arguments.tensor("index");
  for (const c10::IValue& item : arguments["indices"].toListRef()) {
    // These operators take indices of the host for values of a device, but masks made of them have to be there.
    if (is_index(item)) return item.toTensor().to(arguments.tensor("self").device());
  }
  return {};
}

void replace_index(const NamedArguments& arguments, const at::Tensor& index) {
  if (!arguments.has("indices")) {
    arguments["index"] = index;
    return;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue& item : arguments["indices"].toListRef())
    list.push_back(is_index(item) ? std::optional(index) : std::nullopt);
  arguments["indices"] = list;
}

/// Whether negative indices count from the end.
enum Wraps : bool { kNeverWraps = false, kWraps = true };

/// Runs the operator on the local shard of `self` with local indices. What other ranks hold is zero.
/// `spread`: broadcasts the mask of these to the result.
Localize reads_local(int64_t dim, Wraps wraps, const std::function<at::Tensor(at::Tensor)>& spread) {
  return [=](const ChosenSpecs& chosen) {
    const Spec& self = chosen.inputs[0];
    if (mesh_dims_of(self, dim).empty()) return LocalCall();
    return LocalCall{
        {}, [=, output = chosen.outputs[0]](const c10::OperatorHandle& op, Stack stack) {
          const NamedArguments arguments(op, stack);
          const at::Tensor x = arguments.tensor("self");
          const LocalIndices local(index_of(arguments), self, dim, 0, {wraps, has_index_error(op)});
          if (x.size(dim) == 0) return Stack{at::zeros(output.local_shape(), x.options())};
          replace_index(arguments, local.indices);
          at::Tensor found = call_operator(op, std::move(stack))[0].toTensor();
          return Stack{found.masked_fill_(spread(local.elsewhere), 0)};
        }};
  };
}

/// Runs the operator on the local shard of `self` with one more position along `dim`, to which all goes that
/// belongs to other ranks.
Localize writes_local(int64_t dim, Wraps wraps) {
  return [=](const ChosenSpecs& chosen) {
    const Spec& self = chosen.inputs[0];
    if (mesh_dims_of(self, dim).empty()) return LocalCall();
    return LocalCall{
        {}, [=](const c10::OperatorHandle& op, Stack stack) {
          const NamedArguments arguments(op, stack);
          const at::Tensor x = arguments.tensor("self");
          const int64_t size = x.size(dim);
          Shape bin = x.sizes().vec();
          bin[dim] = 1;
          arguments["self"] = at::cat({x, at::zeros(bin, x.options())}, dim);
          const LocalIndices local(index_of(arguments), self, dim, size, {wraps, has_index_error(op)});
          replace_index(arguments, local.indices);
          const at::Tensor result = call_operator(op, std::move(stack))[0].toTensor();
          return Stack{result.narrow(dim, 0, size).clone()};
        }};
  };
}

/// An index for each element of a tensor, or for slices of it.
enum class Indexes { elements, slices };

Rule indexed(IndexedDim::Access access, Indexes indexes, bool moves = false) {
  Rule rule = IndexedDim{access, indexes == Indexes::elements, moves};
  const bool reads = access == IndexedDim::Access::read;
  rule.local.text = reads ? "zeros for what other ranks hold" : "what other ranks hold is left out";
  rule.local.of = [=](const OpCall& call) -> Localize {
    const int64_t ndim = call.tensors[0].ndim();
    if (ndim == 0) return {};
    const int64_t dim = wrapped(call.integer("dim"), ndim);
    if (!reads) return writes_local(dim, kNeverWraps);
    return reads_local(dim, kNeverWraps, [=](const at::Tensor& mask) {
      Shape sizes(ndim, 1);
      sizes[dim] = mask.numel();
      return indexes == Indexes::elements ? mask : mask.view(sizes);
    });
  };
  return rule;
}

/// How x[i, :, j] is laid out: which dims are indexed, and where the indices' own dims come to stand.
struct Indexing {
  Shape dims;                     // indexed ones
  Shape shape;                    // of the indices together
  Letters self, indices, output;  // indices: of their dims together
  Shape result;
  /// Some dims are indexed by plain scalar tensors, which are not among the call's tensors. These dims are unsharded.
  bool has_scalars = false;

  static std::optional<Indexing> of(const OpCall& call) {
    const auto self = call.tensor("self");
    if (!self) return std::nullopt;
    const Spec& x = call.tensors[*self];
    Indexing found;
    int64_t dim = 0;
    size_t next = *self + 1;
    for (const c10::IValue& item : call.value("indices").toListRef()) {
      if (is_index(item)) {
        const at::Tensor& index = item.toTensor();
        if (index.scalar_type() != at::kLong && index.scalar_type() != at::kInt) return std::nullopt;
        found.dims.push_back(dim);
        if (index.dim() == 0 && !DTensorImpl::of(index)) {
          found.has_scalars = true;
          ++dim;
          continue;
        }
        if (next >= call.tensors.size() || call.tensors[next].shape() != index.sizes()) return std::nullopt;
        found.shape = at::infer_size(found.shape, index.sizes());
        ++next;
      }
      ++dim;
    }
    if (found.dims.empty() || dim > x.ndim()) return std::nullopt;
    found.self = identity(x.ndim());
    for (size_t i = 0; i < found.shape.size(); ++i) found.indices.push_back(static_cast<char>('A' + i));
    const bool adjacent =
        found.dims.back() - found.dims.front() + 1 == static_cast<int64_t>(found.dims.size());
    auto put_indices = [&] {
      found.output.insert(found.output.end(), found.indices.begin(), found.indices.end());
      found.result.insert(found.result.end(), found.shape.begin(), found.shape.end());
    };
    if (!adjacent) put_indices();
    for (int64_t d = 0; d < x.ndim(); ++d) {
      if (adjacent && d == found.dims.front()) put_indices();
      if (contains(found.dims, d)) continue;
      found.output.push_back(found.self[d]);
      found.result.push_back(x.shape()[d]);
    }
    return found;
  }
};

std::optional<Strategies> index(const OpCall& call) {
  if (auto strategies = masked_index(call)) return strategies;
  auto indexing = Indexing::of(call);
  if (!indexing) return std::nullopt;
  const Spec& x = call.tensors[0];
  const bool one = indexing->dims.size() == 1 && !indexing->has_scalars;
  for (const int64_t dim : indexing->dims) {
    if (!one) indexing->self[dim] = kUnsharded;
  }
  Einsum einsum{.inputs = {indexing->self}, .outputs = {indexing->output}, .contracted = selected(x)};
  for (const size_t i : c10::irange<size_t>(1, call.tensors.size()))
    einsum.inputs.push_back(broadcast(call.tensors[i].shape(), indexing->shape, indexing->indices));
  einsum.linear = linear_tensors(call, {{"self"}});
  einsum.contiguous = true;
  Strategies strategies{strategies_of(einsum), {{indexing->result}}};
  if (one) {
    const int64_t dim = indexing->dims[0], after = x.ndim() - dim - 1;
    strategies.localize = reads_local(dim, kWraps, [after](at::Tensor mask) {
      for (int64_t i = 0; i < after; ++i) mask = mask.unsqueeze(-1);
      return mask;
    });
  }
  return strategies;
}

std::optional<Strategies> index_put(const OpCall& call) {
  if (auto strategies = masked_index_put(call)) return strategies;
  auto indexing = Indexing::of(call);
  if (!indexing) return std::nullopt;
  const auto values = call.tensor("values");
  const Spec& x = call.tensors[0];
  const bool one = indexing->dims.size() == 1 && !indexing->has_scalars, adds = call.flag("accumulate");
  for (const int64_t dim : indexing->dims) {
    if (!one) indexing->self[dim] = kUnsharded;
  }
  if (values && !at::is_expandable_to(call.tensors[*values].shape(), indexing->result)) return std::nullopt;
  // Only what is added may be sharded: each rank adds its own.
  if (!adds || !values || x.dtype() == c10::ScalarType::Bool) {
    for (Letters* letters : {&indexing->indices, &indexing->output}) {
      for (char& letter : *letters) letter = letter >= 'A' && letter <= 'Z' ? kUnsharded : letter;
    }
  }
  Einsum einsum{.inputs = {indexing->self}, .outputs = {indexing->self}};
  for (const size_t i : c10::irange<size_t>(1, call.tensors.size())) {
    const bool is_value = values && i == *values;
    einsum.inputs.push_back(is_value
                                ? broadcast(call.tensors[i].shape(), indexing->result, indexing->output)
                                : broadcast(call.tensors[i].shape(), indexing->shape, indexing->indices));
  }
  // A value that is the same for all indices would be added by each rank for those it has: that is right too.
  einsum.added = {0};
  einsum.contiguous = true;
  if (values && x.dtype() == call.tensors[*values].dtype() && at::isFloatingType(x.dtype()))
    einsum.linear = {{0, *values}};
  Strategies strategies{strategies_of(einsum), {{x.shape().vec()}}};
  if (one) strategies.localize = writes_local(indexing->dims[0], kWraps);
  return strategies;
}

/// What a rank computes of the local elements of `self`, if that is sharded.
LocalStep of_local_elements(const char* text,
                            Stack (*compute)(const Spec& self, const c10::OperatorHandle& op,
                                             Stack arguments)) {
  return {text, [compute](const OpCall&) -> Localize {
            return [compute](const ChosenSpecs& chosen) {
              const Spec& self = chosen.inputs[0];
              if (!self.is_sharded()) return LocalCall();
              return LocalCall{{}, [=](const c10::OperatorHandle& op, Stack arguments) {
                                 return compute(self, op, std::move(arguments));
                               }};
            };
          }};
}

Stack take_local(const Spec& self, const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const at::Tensor x = arguments.tensor("self");
  const LocalElements local(arguments.tensor("index"), self);
  if (x.numel() == 0) return {at::zeros(local.indices.sizes(), x.options())};
  arguments["index"] = local.indices;
  at::Tensor found = call_operator(op, std::move(stack))[0].toTensor();
  return {found.masked_fill_(at::logical_not(local.is_local), 0)};
}

Stack put_local(const Spec& self, const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  const LocalElements local(arguments.tensor("index"), self);
  const at::Tensor which = at::nonzero(local.is_local.flatten()).squeeze(1);
  arguments["index"] = at::index_select(local.indices.flatten(), 0, which);
  arguments["source"] = at::index_select(arguments.tensor("source").flatten(), 0, which);
  return call_operator(op, std::move(stack));
}

Rule take() {
  Rule rule = Pattern{
      .letters = {"A,B->B"}, .linear = {{"self"}}, .contiguous = "A", .selects = true, .never_empty = true};
  rule.local = of_local_elements("zeros for what other ranks hold", take_local);
  return rule;
}

Rule put() {
  Rule rule =
      Pattern{.letters = {"A,..,..->A"}, .contiguous = "A", .never_empty = true, .keeps_strides = true};
  rule.local = of_local_elements("what other ranks hold is left out", put_local);
  return rule;
}

}  // namespace

Table index_rules() {
  using Access = IndexedDim::Access;
  const std::string why = "the list of indices says which dims are indexed";
  return {
      {{"index_select"}, indexed(Access::read, Indexes::slices, /*moves=*/true)},
      {{"gather"}, indexed(Access::read, Indexes::elements, /*moves=*/true)},
      {{"scatter.src", "scatter.value"}, indexed(Access::write, Indexes::elements, /*moves=*/true)},
      {{"scatter.reduce", "scatter.value_reduce", "scatter_reduce.two"},
       indexed(Access::write, Indexes::elements)},
      {{"scatter_add"}, indexed(Access::add, Indexes::elements)},
      {{"index_add"}, indexed(Access::add, Indexes::slices)},
      {{"index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor"},
       indexed(Access::write, Indexes::slices, /*moves=*/true)},
      {{"index_reduce"}, indexed(Access::write, Indexes::slices)},
      {{"take"}, take()},
      {{"put"}, put()},
      {{"isin.Tensor_Tensor"}, Pattern{{"B,..->B"}}},
      {{"index.Tensor", "_unsafe_index.Tensor"},
       {"dims without index sharded; one indexed dim: P(sum), zeros for what other ranks hold; indices "
        "sharded; "
        "masks as masked_select",
        index,
        {"indices"},
        why}},
      {{"index_put", "_unsafe_index_put", "_index_put_impl"},
       {"dims without index sharded, or one indexed dim; what is added sharded: P(sum); masks as "
        "masked_scatter",
        index_put,
        {"indices", "accumulate"},
        why}},
      {{"_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"},
       composed({"clamp", "index", "masked_fill"})},
  };
}

}  // namespace tessera::ops

// --- autograd

/// x[i] and x[mask] of what is sharded: so is the gradient. libtorch's formula adds into zeros in place,
/// which are unsharded, as it knows nothing of x but its shape.
namespace tessera {

namespace {

using Indices = c10::List<std::optional<at::Tensor>>;

/// A tensor that is placed like another, and takes no memory.
at::Tensor placed_like(const at::Tensor& tensor) {
  const DTensorImpl& impl = *DTensorImpl::of(tensor);
  const Spec& spec = impl.spec();
  const at::Tensor local = at::zeros({}, impl.local().options()).expand(spec.local_shape());
  return make_dtensor(local, Spec(spec.mesh(), spec.placements(), spec.shape(),
                                  c10::DimVector(spec.ndim(), 0), spec.dtype(), spec.order()));
}

struct IndexOfSharded : torch::autograd::Function<IndexOfSharded> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& self,
                            const Indices& indices) {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<at::Tensor> saved{placed_like(self)};
    for (const std::optional<at::Tensor>& index : indices) saved.push_back(index.value_or(at::Tensor()));
    context->save_for_backward(std::move(saved));
    return at::index(self, indices);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    Indices indices;
    for (size_t i = 1; i < saved.size(); ++i)
      indices.push_back(saved[i].defined() ? std::optional(saved[i]) : std::nullopt);
    const at::Tensor zeros = at::zeros_like(saved[0], gradients[0].options());
    return {at::index_put(zeros, indices, gradients[0], /*accumulate=*/true), at::Tensor()};
  }
};

at::Tensor index(c10::DispatchKeySet keys, const at::Tensor& self, const Indices& indices) {
  const DTensorImpl* impl = DTensorImpl::of(self);
  if (!impl || !impl->spec().is_sharded() || !at::GradMode::is_enabled() || !self.requires_grad() ||
      has_tangent(self))
    return as_one<at::_ops::index_Tensor>(keys, self, indices);
  return IndexOfSharded::apply(self, indices);
}

/// libtorch adds to zeros in place, which are replicated and would have to stay so.
at::Tensor index_select_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes, int64_t dim,
                                 const at::Tensor& index) {
  return grad.new_zeros_symint(sizes).index_add(dim, index, grad);
}

/// libtorch adds to replicated zeros in place here too.
at::Tensor gather_backward(const at::Tensor& grad, const at::Tensor& self, int64_t dim,
                           const at::Tensor& index, bool sparse_grad) {
  if (sparse_grad) return at::_gather_sparse_backward(self, dim, index, grad);
  return grad.new_zeros_symint(self.sym_sizes()).scatter_add(dim, index, grad);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  library.impl("index.Tensor", index);
  library.impl("index_select_backward", index_select_backward);
  library.impl("gather_backward", gather_backward);
}

}  // namespace

}  // namespace tessera
