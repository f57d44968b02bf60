#include <tessera/rules/family.h>

namespace tessera::rules {

namespace {

std::optional<Proposal> sort(const Call& call) {
  const Spec& spec = call.tensors[0];
  const Result result{spec.shape().vec(), dense_strides(spec)};
  return whole_dims(call, spec.ndim() ? Shape{wrapped(call.integer("dim"), spec.ndim())} : Shape(),
                    {result, result});
}

std::optional<Proposal> topk(const Call& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const int64_t dim = wrapped(call.integer("dim"), spec.ndim());
  Shape shape = spec.shape().vec();
  shape[dim] = call.integer("k");
  return whole_dims(call, {dim}, {{shape}, {shape}});
}

/// Each of the values by itself.
std::optional<Proposal> bucketize(const Call& call) {
  const auto self = call.tensor("self"), boundaries = call.tensor("boundaries");
  if (!self || !boundaries) return std::nullopt;
  const Letters all = identity(call.tensors[*self].ndim());
  Einsum einsum{.inputs = {all, {kWhole}}, .outputs = {all}};
  return Proposal{rows(einsum), {{call.tensors[*self].shape().vec()}}};
}

/// Each of the values by itself, in a sequence of its own row, or in the one there is.
std::optional<Proposal> searchsorted(const Call& call) {
  const auto sequence = call.tensor("sorted_sequence"), self = call.tensor("self");
  if (!sequence || !self) return std::nullopt;
  const Spec &x = call.tensors[*self], &sorted = call.tensors[*sequence];
  const Letters all = identity(x.ndim());
  Letters of_sequence{kWhole};
  if (sorted.ndim() > 1) {
    if (sorted.ndim() != x.ndim()) return std::nullopt;
    of_sequence = all;
    of_sequence.back() = kWhole;
  }
  // A sorter is like the sequence.
  Einsum einsum{.inputs = std::vector<Letters>(call.tensors.size(), of_sequence), .outputs = {all}};
  einsum.inputs[*self] = all;
  return Proposal{rows(einsum), {{x.shape().vec()}}};
}

/// Half of the dim by the other half.
std::optional<Proposal> glu(const Call& call) {
  const Spec& spec = call.tensors[0];
  const int64_t dim = wrapped(call.integer("dim"), spec.ndim());
  Shape shape = call.tensors.back().shape().vec();
  if (call.tensors.size() == 1) shape[dim] /= 2;
  return whole_dims(call, {dim}, {{shape}});
}

}  // namespace

Table sort_rules() {
  return {
      {{"sort", "sort.stable"}, {"the dim whole", sort, {"dim"}}},
      {{"topk"}, {"the dim whole", topk, {"dim", "k"}}},
      {{"bucketize.Tensor"}, {"pointwise, boundaries whole", bucketize}},
      {{"searchsorted.Tensor"}, {"pointwise, the sequence whole", searchsorted}},
      {{"glu", "glu_backward"}, {"the dim whole", glu, {"dim"}}},
  };
}

}  // namespace tessera::rules
