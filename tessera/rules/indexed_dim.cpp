#include <tessera/rules/indexed_dim.h>
#include <tessera/rules/shape.h>

#include <algorithm>

#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

using Access = IndexedDim::Access;

/// The letters of the tensors of a call, besides which all are unsharded.
struct Indexed {
  int64_t dim = 0;
  Letters self = {};
  Letters index = {};
  Letters source = {};  // also of what is read
  Shape read = {};      // its shape
};

constexpr char kIndexed = 'x', kIndex = 'z';

/// The one tensor of values, if there is one.
std::optional<size_t> source_of(const OpCall& call) {
  const auto source = call.tensor("source");
  return source ? source : call.tensor("src");
}

/// Letters for dims in which all have the same size; others, and `dim`, are unsharded.
Letters common(const std::vector<c10::IntArrayRef>& shapes, int64_t dim) {
  Letters letters = identity(shapes[0].size());
  for (const size_t d : c10::irange(letters.size())) {
    const bool same = std::all_of(shapes.begin(), shapes.end(),
                                  [&](c10::IntArrayRef shape) { return shape[d] == shapes[0][d]; });
    if (!same || static_cast<int64_t>(d) == dim) letters[d] = kUnsharded;
  }
  return letters;
}

/// An index for each element.
std::optional<Indexed> of_elements(const OpCall& call, Access access, const Spec& x) {
  const auto index = call.tensor("index"), source = source_of(call);
  if (!index || call.tensors.size() != (source ? 3U : 2U)) return std::nullopt;
  const Spec& i = call.tensors[*index];
  if (i.ndim() != x.ndim() || (source && call.tensors[*source].ndim() != x.ndim())) return std::nullopt;
  Indexed result{.dim = wrapped(call.integer("dim"), x.ndim()), .read = i.shape().vec()};
  std::vector<c10::IntArrayRef> shapes{x.shape(), i.shape()};
  if (source) shapes.push_back(call.tensors[*source].shape());
  for (const int64_t d : c10::irange(x.ndim())) {
    if (access == Access::read && d != result.dim && i.shape()[d] > x.shape()[d]) return std::nullopt;
  }
  result.self = result.index = common(shapes, result.dim);
  const bool is_even = source && call.tensors[*source].shape()[result.dim] == i.shape()[result.dim];
  if (access == Access::read || (access == Access::add && is_even)) result.index[result.dim] = kIndex;
  result.source = result.index;
  return result;
}

/// An index for each slice: a vector, or a scalar, which stands for a dim of size 1.
std::optional<Indexed> of_slices(const OpCall& call, Access access, const Spec& x) {
  const auto index = call.tensor("index"), source = source_of(call);
  if (call.position("source") && (!source || call.tensors[*source].ndim() != x.ndim())) return std::nullopt;
  const int64_t ndim = index ? call.tensors[*index].ndim() : 0;
  if (ndim > 1) return std::nullopt;
  const char letter = ndim == 1 && access != Access::write ? kIndex : kUnsharded;
  Indexed result{.dim = wrapped(call.integer("dim"), x.ndim()),
                 .self = identity(x.ndim()),
                 .index = Letters(ndim, letter),
                 .source = identity(x.ndim()),
                 .read = x.shape().vec()};
  result.source[result.dim] = letter;
  result.read[result.dim] = index ? call.tensors[*index].numel() : 1;
  return result;
}

/// Values that are only moved may be partial in any way, together with those that are written. A number that is
/// the same on all ranks is what their average, largest and smallest is.
void add_partial_options(const OpCall& call, size_t self, Strategies& strategies) {
  Placements inputs;
  inputs.assign(call.tensors.size(), Replicate());
  inputs[self] = Partial();
  bool has_source = false;
  for (const char* name : {"source", "src", "value"}) {
    if (!call.position(name)) continue;
    const auto source = call.tensor(name);
    if (source) inputs[*source] = Partial();
    has_source |= source.has_value();
  }
  const bool writes_number = call.position("value") && !has_source;
  if (!writes_number) {
    strategies.options.push_back({inputs, {Partial()}});
    strategies.options.back().any_partial = true;
    return;
  }
  for (const ReduceOp op : {ReduceOp::avg, ReduceOp::max, ReduceOp::min}) {
    inputs[self] = Partial(op);
    strategies.options.push_back({inputs, {Partial(op)}});
  }
}

/// A scalar, which the index points to as a whole.
Strategies of_scalar(const IndexedDim& form, const OpCall& call, size_t self) {
  Einsum einsum{.inputs = {}, .outputs = {Letters()}};
  for (const Spec& spec : call.tensors) einsum.inputs.emplace_back(spec.ndim(), kUnsharded);
  if (form.access == Access::add) einsum.linear = linear_tensors(call, {{"self", "source"}});
  Strategies strategies{strategies_of(einsum), {{Shape()}}};
  if (form.moves) add_partial_options(call, self, strategies);
  return strategies;
}

}  // namespace

std::optional<Strategies> strategies_of(const IndexedDim& form, const OpCall& call) {
  const auto self = call.tensor("self");
  if (!self) return std::nullopt;
  const Spec& x = call.tensors[*self];
  if (x.ndim() == 0) return form.elementwise ? std::nullopt : std::optional(of_scalar(form, call, *self));
  auto indexed = form.elementwise ? of_elements(call, form.access, x) : of_slices(call, form.access, x);
  if (!indexed) return std::nullopt;
  indexed->self[indexed->dim] = kIndexed;
  const bool reads = form.access == Access::read, is_bool = x.dtype() == at::kBool;
  Einsum einsum{.inputs = {}, .outputs = {reads ? indexed->source : indexed->self}, .contiguous = true};
  for (const size_t i : c10::irange(call.tensors.size())) {
    einsum.inputs.push_back(i == *self                  ? indexed->self
                            : i == call.tensor("index") ? indexed->index
                            : i == source_of(call)      ? indexed->source
                                                        : Letters(call.tensors[i].ndim(), kUnsharded));
  }
  if (reads) {
    if (is_bool) einsum.contracted = Partial(ReduceOp::any);
  } else {
    if (is_bool) einsum.contracted = std::nullopt;
    einsum.added = {*self};
    if (form.access == Access::add)
      einsum.linear = linear_tensors(call, {{"self", "src"}, {"self", "source"}});
  }
  Strategies strategies{strategies_of(einsum), {{reads ? indexed->read : x.shape().vec()}}};
  if (form.moves) add_partial_options(call, *self, strategies);
  return strategies;
}

std::string text_of(const IndexedDim& form) {
  std::string result = "`dim` of `self` sharded";
  if (form.access == Access::read) result += ": P(sum), of bool P(any); or `index`";
  if (form.access == Access::add) result += "; or of what is added: P(sum), linear in both";
  if (form.moves) result += "; any partial stays";
  return result + "; other dims alike; no strided shards";
}

}  // namespace tessera::rules
