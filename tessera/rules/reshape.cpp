#include <tessera/rules/dim_map.h>
#include <tessera/rules/shape.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

/// A maximal run of dims that a view leaves alone, splits or joins. Dims of size 1, which come and go, are in
/// none.
///   [6, 4, 1, 5] as [3, 8, 5]:  dims 0 to 1 are dims 0 to 1, and dim 3 is dim 2
struct Run {
  size_t from, from_end;
  size_t to, to_end;

  bool is_one() const { return from_end - from == 1 && to_end - to == 1; }
};

std::vector<Run> runs(c10::IntArrayRef from, c10::IntArrayRef to) {
  std::vector<Run> result;
  size_t i = 0, j = 0;
  auto skip_ones = [&] {
    while (i < from.size() && from[i] == 1) ++i;
    while (j < to.size() && to[j] == 1) ++j;
  };
  for (skip_ones(); i < from.size() && j < to.size(); skip_ones()) {
    Run run{i, i, j, j};
    int64_t a = from[i++], b = to[j++];
    while (a != b) {
      if (a < b) {
        a *= from[i++];
      } else {
        b *= to[j++];
      }
    }
    run.from_end = i;
    run.to_end = j;
    result.push_back(run);
  }
  return result;
}

int64_t product(const Shape& sizes, size_t begin, size_t end) {
  return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(begin),
                         sizes.begin() + static_cast<std::ptrdiff_t>(end), int64_t{1}, std::multiplies<>());
}

Placement shard_of(size_t dim, int64_t split) {
  return split == 1 ? Shard(static_cast<int64_t>(dim)) : StridedShard(static_cast<int64_t>(dim), split);
}

ShardOrder order_of(const Spec& spec) {
  ShardOrder order = spec.order();
  if (!order.empty()) return order;
  order.resize(spec.mesh().shape().size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

/// The dim of size 1 of a view that stands where dim `dim`, of size 1, stands in the tensor; else the first of that size.
std::optional<size_t> counterpart_of_one(c10::IntArrayRef from, size_t dim, const Shape& to) {
  const Shape sizes = from.vec();
  std::optional<size_t> found;
  for (const size_t j : c10::irange(to.size())) {
    if (to[j] != 1) continue;
    if (product(to, 0, j) == product(sizes, 0, dim)) return j;
    if (!found) found = j;
  }
  return found;
}

/// The placements under which each rank has the same elements of the view as of the tensor; nothing if there
/// are none. A shard of a dim that is not the first of its run takes a part of each block of the joined dim.
///   [4, 6] S(1) as [24]: SS(0, 4)          [24] SS(0, 4) as [4, 6]: S(1)
std::optional<Placements> kept_shards(const Spec& spec, const Shape& to) {
  const std::vector<Run> all = runs(spec.shape(), to);
  const auto& mesh = spec.mesh().shape();
  Placements result = spec.placements();
  // Of the tensor and the view, sharded by the mesh dims before: the same elements, in the same order.
  Shape tensor = spec.shape().vec(), view = to;
  for (const int64_t m : order_of(spec)) {
    const Placement& now = spec.placement(m);
    if (!now.is_shard_like()) continue;
    const auto dim = static_cast<size_t>(now.dim());
    const auto run = std::find_if(all.begin(), all.end(),
                                  [&](const Run& each) { return each.from <= dim && dim < each.from_end; });
    const int64_t split = now.is_strided_shard() ? now.split() : 1;
    if (run == all.end()) {  // the first rank has all
      const auto one = counterpart_of_one(spec.shape(), dim, to);
      if (!one) return std::nullopt;
      result[m] = shard_of(*one, split);
      continue;
    }
    if (run->is_one()) {
      result[m] = shard_of(run->to, split);
      continue;
    }
    if (tensor[dim] % (split * mesh[m]) != 0) return std::nullopt;
    // Of every `block` elements in a row, each rank takes `share`.
    const int64_t block = tensor[dim] / split * product(tensor, dim + 1, run->from_end),
                  share = block / mesh[m];
    std::optional<Placement> then;
    for (size_t j = run->to; j < run->to_end && !then; ++j) {
      const int64_t inner = product(view, j + 1, run->to_end);
      if (share % inner != 0 || view[j] * inner % block != 0) continue;
      then = shard_of(j, view[j] * inner / block);
      view[j] /= mesh[m];
    }
    if (!then) return std::nullopt;
    result[m] = *then;
    tensor[dim] /= mesh[m];
  }
  return result;
}

/// Shards stay where each rank can keep what it has. Else that of the first dim of a run may, on both sides,
/// if it falls on the same elements: where it is even, or the dim keeps its size.
std::vector<Strategy> sharded_options(const Spec& spec, const Shape& to) {
  const auto from = spec.shape();
  std::vector<Strategy> options;
  if (spec.numel() == 0) {
    if (from != c10::IntArrayRef(to)) return options;
    for (const int64_t dim : c10::irange(spec.ndim())) options.push_back({{Shard(dim)}, {Shard(dim)}});
  } else if (const auto kept = kept_shards(spec, to)) {
    for (const size_t m : c10::irange(kept->size())) {
      if (!spec.placement(m).is_shard_like()) continue;
      options.push_back({{spec.placement(m)}, {(*kept)[m]}});
      options.back().mesh_dim = static_cast<int64_t>(m);
    }
  } else {
    for (const Run& run : runs(from, to)) {
      const int64_t divisor = from[run.from] == to[run.to] ? 0 : std::gcd(from[run.from], to[run.to]);
      options.push_back({{shard_of(run.from, 1)}, {shard_of(run.to, 1)}, divisor});
    }
  }
  return options;
}

/// In the local shape. Local memory may lie otherwise than the strides say, so that it has to be copied.
LocalCall reshaped(const ChosenSpecs& chosen) {
  const Shape shape = chosen.outputs[0].local_shape().vec();
  LocalCall local;
  local.compute = [shape](const c10::OperatorHandle&, Stack arguments) {
    return Stack{self_tensor(arguments).reshape(shape)};
  };
  local.write_back = [](const at::Tensor& base, const at::Tensor& view) {
    base.copy_(view.view(base.sizes()));
  };
  return local;
}

}  // namespace

std::optional<Strategies> strategies_of(const Reshape& /*form*/, const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape to = at::infer_size(call.integers("size"), spec.numel());
  Strategies strategies{sharded_options(spec, to), {{to}}, reshaped};
  if (const auto strides = at::detail::computeStride(spec.shape(), spec.strides(), to))
    strategies.results[0].strides.assign(strides->begin(), strides->end());
  Strategy partial{{Partial()}, {Partial()}};
  partial.any_partial = true;
  strategies.options.push_back(std::move(partial));
  return strategies;
}

}  // namespace tessera::rules
