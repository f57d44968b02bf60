#include <tessera/comm/collectives.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <limits>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

std::optional<Strategies> sort(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Result result{spec.shape().vec(), dense_strides(spec)};
  return unsharded_dims(call, spec.ndim() ? Shape{wrapped(call.integer("dim"), spec.ndim())} : Shape(),
                        {result, result});
}

/// The first so many along a dim, in some order: their values, and where they are. The dim stays, with as
/// many.
using First = std::function<std::pair<at::Tensor, at::Tensor>(const at::Tensor& x)>;

/// Where the dim is cut: each rank's first ones, and the first of these. `each`: how many a rank has to name;
/// `first`: of what a rank holds, if that is not nothing.
void add_candidates(Strategies& strategies, const Spec& x, int64_t dim, int64_t each, const First& first,
                    const std::function<Stack(const at::Tensor& values, const at::Tensor& places)>& finish) {
  if (each * x.mesh().size() >= x.shape()[dim]) return;
  strategies.options.push_back(
      {{Shard(dim)}, Placements(strategies.results.size(), Replicate()), 0, /*contiguous=*/true});
  strategies.localize = [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[0];
    const std::vector<int64_t> mesh_dims = mesh_dims_of(x, dim);
    if (mesh_dims.empty()) return local;
    local.communicates = true;
    local.compute = [=, ranks = ShardGroup(x, mesh_dims, dim), offset = x.global_offset()[dim]](
                        const c10::OperatorHandle&, Stack arguments) {
      std::vector<int64_t> sizes;
      for (const int64_t held : ranks.held()) sizes.push_back(std::min(each, held));
      const at::Tensor held = arguments[0].toTensor();
      at::Tensor values = held, places = new_memory(held.sizes(), held.options().dtype(at::kLong));
      if (held.size(dim) > 0) std::tie(values, places) = first(held);
      return finish(ranks.join(values, dim, sizes), ranks.join(at::add(places, offset), dim, sizes));
    };
    return local;
  };
}

std::optional<Strategies> topk(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const int64_t dim = wrapped(call.integer("dim"), spec.ndim()), k = call.integer("k");
  Shape shape = spec.shape().vec();
  shape[dim] = k;
  Strategies strategies = unsharded_dims(call, {dim}, {{shape}, {shape}});
  const bool largest = call.flag("largest"), sorted = call.flag("sorted");
  add_candidates(
      strategies, spec, dim, k,
      [=](const at::Tensor& x) {
        const auto [values, places] = at::topk(x, std::min(k, x.size(dim)), dim, largest, sorted);
        return std::pair(values, places);
      },
      [=](const at::Tensor& values, const at::Tensor& places) {
        const auto [found, which] = at::topk(values, k, dim, largest, sorted);
        return Stack{found, at::gather(places, dim, which)};
      });
  return strategies;
}

/// Where an element of what a rank holds lies in the whole, both counted row by row.
int64_t global_place(int64_t place, const Spec& spec) {
  int64_t result = 0, weight = 1;
  for (int64_t dim = spec.ndim(); dim-- > 0;) {
    const int64_t held = spec.local_shape()[dim];
    result += (place % held + spec.global_offset()[dim]) * weight;
    weight *= spec.shape()[dim];
    place /= held;
  }
  return result;
}

/// Where the largest or the smallest of all elements is.
Strategies extreme_of_all(const Spec& spec, bool largest, bool keep) {
  Strategies strategies;
  const Shape shape(keep ? spec.ndim() : 0, 1);
  strategies.results = {{shape}};
  if (spec.numel() == 0) return strategies;
  for (const int64_t dim : c10::irange(spec.ndim()))
    strategies.options.push_back({{Shard(dim)}, {Replicate()}, 0, /*contiguous=*/true});
  strategies.localize = [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec& x = chosen.inputs[0];
    if (!x.is_sharded()) return local;
    local.communicates = true;
    local.compute = [=, ranks = ShardGroup(x, mesh_dims_of(x), 0)](const c10::OperatorHandle&,
                                                                   Stack arguments) {
      const auto first = [&](const at::Tensor& values) {
        return largest ? at::argmax(values) : at::argmin(values);
      };
      at::Tensor value = arguments[0].toTensor().flatten();
      at::Tensor place = at::empty({0}, value.options().dtype(at::kLong));
      if (value.numel() > 0) {
        const auto here = first(value).item<int64_t>();
        value = value.narrow(0, here, 1);
        place = at::full({1}, global_place(here, x), place.options());
      }
      const std::vector<int64_t> sizes = ranks.sizes(value, 0);
      // Of equal ones the first.
      const auto [places, order] = at::sort(ranks.join(place, 0, sizes));
      const at::Tensor values = at::index_select(ranks.join(value, 0, sizes), 0, order);
      return Stack{at::index_select(places, 0, first(values).view({1})).view(shape)};
    };
    return local;
  };
  return strategies;
}

/// The largest or the smallest along a dim, and where it is, or only that.
Rule extreme_rule(bool largest, bool with_values) {
  return {"the dim cut: each rank's, and the first of these",
          [=](const OpCall& call) -> std::optional<Strategies> {
            const Spec& spec = call.tensors[0];
            if (spec.ndim() == 0) return std::nullopt;
            if (!call.has("dim")) return extreme_of_all(spec, largest, call.flag("keepdim"));
            const int64_t dim = wrapped(call.integer("dim"), spec.ndim());
            const bool keep = call.flag("keepdim");
            Letters letters = identity(spec.ndim()), rest = letters;
            Shape shape = spec.shape().vec();
            letters[dim] = rest[dim] = kUnsharded;
            shape[dim] = 1;
            if (!keep) {
              rest.erase(rest.begin() + dim);
              shape.erase(shape.begin() + dim);
            }
            const size_t results = with_values ? 2 : 1;
            Einsum einsum{.inputs = {letters}, .outputs = std::vector<Letters>(results, rest)};
            Strategies strategies{strategies_of(einsum), std::vector<Result>(results, {shape})};
            const auto first = [=](const at::Tensor& x) {
              const auto [values, places] = largest ? at::max(x, dim, true) : at::min(x, dim, true);
              return std::pair(values, places);
            };
            add_candidates(strategies, spec, dim, 1, first,
                           [=](const at::Tensor& values, const at::Tensor& places) {
                             auto [found, which] = first(values);
                             which = at::gather(places, dim, which);
                             if (!keep) {
                               found = found.squeeze(dim);
                               which = which.squeeze(dim);
                             }
                             return with_values ? Stack{found, which} : Stack{which};
                           });
            return strategies;
          },
          {"dim", "keepdim"}};
}

/// Numbers that are in the same order as the values, of as many bits; NaN is none of these.
struct Keys {
  at::ScalarType dtype;  // of the values
  bool floats, wide;

  explicit Keys(at::ScalarType of)
      : dtype(of), floats(at::isFloatingType(of)), wide(of == at::kDouble || of == at::kLong) {}

  int bits() const { return wide ? 64 : 32; }
  at::ScalarType as_float() const { return wide ? at::kDouble : at::kFloat; }
  at::ScalarType as_int() const { return wide ? at::kLong : at::kInt; }

  /// Where a float is negative, all bits but the sign are the other way round. Its own converse.
  at::Tensor turned(const at::Tensor& key) const {
    const int64_t magnitude =
        wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
    return at::where(at::lt(key, 0), at::bitwise_xor(key, magnitude), key);
  }
  at::Tensor of(const at::Tensor& values) const {
    return floats ? turned(values.to(as_float()).view(as_int())) : values.to(as_int());
  }
  at::Tensor value(int64_t key, const at::TensorOptions& options) const {
    const at::Tensor number = at::full({}, key, options.dtype(as_int()));
    return (floats ? turned(number).view(as_float()) : number).to(dtype);
  }
};

/// The element with `rank` others before it, of those that all ranks of a group have: some bits at a time,
/// from the highest on, by counting how often each value of them occurs. Collective.
at::Tensor ranked(const at::Tensor& values, int64_t rank, const Group& group) {
  constexpr int kBits = 11;
  const Keys kind(values.scalar_type());
  at::Tensor keys = kind.of(values).flatten();
  int64_t found = 0;
  for (int shift = kind.bits(); shift > 0;) {
    const int bits = std::min(kBits, shift);
    const bool first = shift == kind.bits();
    shift -= bits;
    const int64_t mask = (int64_t{1} << bits) - 1, sign = first ? int64_t{1} << (bits - 1) : 0;
    const at::Tensor digits =
        at::bitwise_xor(at::bitwise_and(at::bitwise_right_shift(keys, shift), mask), sign);
    const at::Tensor counts = at::bincount(digits, {}, mask + 1);
    comm::all_reduce(counts, c10d::ReduceOp::SUM, group).wait();
    const at::Tensor through = at::cumsum(counts, 0).cpu();
    const auto* sums = through.const_data_ptr<int64_t>();
    const int64_t digit = std::upper_bound(sums, sums + mask + 1, rank) - sums;
    if (digit > 0) rank -= sums[digit - 1];
    found = found << bits | (digit ^ sign);
    keys = at::masked_select(keys, at::eq(digits, digit));
  }
  return kind.value(kind.wide ? found : static_cast<int32_t>(found), values.options());
}

/// The median of all elements.
Rule median_rule(bool without_nan) {
  return {"cut: by counting values of some bits at a time",
          [=](const OpCall& call) -> std::optional<Strategies> {
            const Spec& spec = call.tensors[0];
            Strategies strategies;
            strategies.results = {{Shape()}};
            // Where all of it takes less than to count, it is gathered.
            if (spec.numel() * static_cast<int64_t>(c10::elementSize(spec.dtype())) <= int64_t{1} << 16)
              return strategies;
            for (const int64_t dim : c10::irange(spec.ndim()))
              strategies.options.push_back({{Shard(dim)}, {Replicate()}});
            strategies.localize = [=](const ChosenSpecs& chosen) {
              LocalCall local;
              const Spec& x = chosen.inputs[0];
              if (!x.is_sharded()) return local;
              local.communicates = true;
              local.compute = [=, group = group_of(x.mesh(), mesh_dims_of(x)), count = x.numel()](
                                  const c10::OperatorHandle&, Stack arguments) {
                at::Tensor values = arguments[0].toTensor();
                int64_t numbers = count;
                if (at::isFloatingType(values.scalar_type())) {
                  const at::Tensor is_number = at::logical_not(at::isnan(values));
                  const at::Tensor told = at::sum(is_number);
                  comm::all_reduce(told, c10d::ReduceOp::SUM, group).wait();
                  numbers = told.item<int64_t>();
                  if (numbers == 0 || (!without_nan && numbers < count))
                    return Stack{at::full({}, std::numeric_limits<double>::quiet_NaN(), values.options())};
                  if (numbers < count) values = at::masked_select(values, is_number);
                }
                return Stack{ranked(values, (numbers - 1) / 2, group)};
              };
              return local;
            };
            return strategies;
          }};
}

/// Each of the values by itself.
std::optional<Strategies> bucketize(const OpCall& call) {
  const auto self = call.tensor("self"), boundaries = call.tensor("boundaries");
  if (!self || !boundaries) return std::nullopt;
  const Letters all = identity(call.tensors[*self].ndim());
  Einsum einsum{.inputs = {all, {kUnsharded}}, .outputs = {all}};
  return Strategies{strategies_of(einsum), {{call.tensors[*self].shape().vec()}}};
}

/// Each of the values by itself, in a sequence of its own row, or in the one there is.
std::optional<Strategies> searchsorted(const OpCall& call) {
  const auto sequence = call.tensor("sorted_sequence"), self = call.tensor("self");
  if (!sequence || !self) return std::nullopt;
  const Spec &x = call.tensors[*self], &sorted = call.tensors[*sequence];
  const Letters all = identity(x.ndim());
  Letters of_sequence{kUnsharded};
  if (sorted.ndim() > 1) {
    if (sorted.ndim() != x.ndim()) return std::nullopt;
    of_sequence = all;
    of_sequence.back() = kUnsharded;
  }
  // A sorter is like the sequence.
  Einsum einsum{.inputs = std::vector<Letters>(call.tensors.size(), of_sequence), .outputs = {all}};
  einsum.inputs[*self] = all;
  return Strategies{strategies_of(einsum), {{x.shape().vec()}}};
}

/// Half of the dim by the other half.
std::optional<Strategies> glu(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const int64_t dim = wrapped(call.integer("dim"), spec.ndim());
  Shape shape = call.tensors.back().shape().vec();
  if (call.tensors.size() == 1) shape[dim] /= 2;
  return unsharded_dims(call, {dim}, {{shape}});
}

}  // namespace

Table sort_rules() {
  return tried({
      {{"sort", "sort.stable"}, {"the dim whole", sort, {"dim"}}},
      {{"topk"},
       {"the dim cut: each rank's, and the first of these", topk, {"dim", "k", "largest", "sorted"}}},
      {{"max.dim"}, extreme_rule(true, true)},
      {{"min.dim"}, extreme_rule(false, true)},
      {{"argmax"}, extreme_rule(true, false)},
      {{"argmin"}, extreme_rule(false, false)},
      {{"median"}, median_rule(false)},
      {{"nanmedian"}, median_rule(true)},
      {{"bucketize.Tensor"}, {"pointwise, boundaries whole", bucketize}},
      {{"searchsorted.Tensor"}, {"pointwise, the sequence whole", searchsorted}},
      {{"glu", "glu_backward"}, {"the dim whole", glu, {"dim"}}},
  });
}

}  // namespace tessera::ops
