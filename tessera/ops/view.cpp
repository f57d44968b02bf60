#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/memory.h>
#include <tessera/redistribute/plan_cache.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

/// A view that leaves each dim as it is, or drops it, or adds some.
struct View {
  Letters input, output;
  Shape shape, strides;

  explicit View(const Spec& spec) : input(identity(spec.ndim())) {}

  void keep(const Spec& spec, int64_t dim) {
    output.push_back(input[dim]);
    shape.push_back(spec.shape()[dim]);
    strides.push_back(spec.strides()[dim]);
  }
  void add(int64_t size, int64_t stride) {
    output.push_back(kUnsharded);
    shape.push_back(size);
    strides.push_back(stride);
  }
  Strategies strategies() const { return moved(input, output, {shape, strides}); }
};

/// The result's dim i is the input's dims[i].
Strategies permuted(const OpCall& call, const Shape& dims) {
  View view(call.tensors[0]);
  for (const int64_t dim : dims) view.keep(call.tensors[0], wrapped(dim, call.tensors[0].ndim()));
  return view.strategies();
}

Strategies swapped(const OpCall& call, int64_t first, int64_t second) {
  const int64_t ndim = call.tensors[0].ndim();
  Shape dims(ndim);
  std::iota(dims.begin(), dims.end(), 0);
  if (ndim > 0) std::swap(dims[wrapped(first, ndim)], dims[wrapped(second, ndim)]);
  return permuted(call, dims);
}

std::optional<Strategies> transposed(const OpCall& call) {
  if (call.tensors[0].ndim() > 2) return std::nullopt;
  return call.tensors[0].ndim() == 2 ? swapped(call, 0, 1) : swapped(call, 0, 0);
}

std::optional<Strategies> unsqueezed(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const int64_t dim = wrapped(call.integer("dim"), spec.ndim() + 1);
  View view(spec);
  for (int64_t d = 0; d <= spec.ndim(); ++d) {
    if (d == dim)
      view.add(1, d < spec.ndim() ? std::max<int64_t>(spec.shape()[d], 1) * spec.strides()[d] : 1);
    if (d < spec.ndim()) view.keep(spec, d);
  }
  return view.strategies();
}

/// Without those of `dims` that have size 1. A rank might hold just 1 of another one, and must not drop it:
/// it makes a view of its own sizes.
std::optional<Strategies> squeezed(const OpCall& call, const Shape& dims) {
  const Spec& spec = call.tensors[0];
  View view(spec);
  Shape dropped;
  for (int64_t d = 0; d < spec.ndim(); ++d) {
    if (contains(dims, d) && spec.shape()[d] == 1) {
      dropped.push_back(d);
    } else {
      view.keep(spec, d);
    }
  }
  Strategies strategies = view.strategies();
  strategies.localize = [dims, dropped](const ChosenSpecs& chosen) {
    LocalCall local;
    const auto held = chosen.inputs[0].local_shape();
    if (std::none_of(dims.begin(), dims.end(),
                     [&](int64_t d) { return held[d] == 1 && !contains(dropped, d); }))
      return local;
    local.compute = [dropped](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      Shape shape, strides;
      for (int64_t d = 0; d < x.dim(); ++d) {
        if (contains(dropped, d)) continue;
        shape.push_back(x.size(d));
        strides.push_back(x.stride(d));
      }
      return Stack{x.as_strided(shape, strides)};
    };
    return local;
  };
  return strategies;
}

/// Cut where the dim is: the rank that holds the index has the result, the others zeros.
std::optional<Strategies> selected(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const int64_t dim = wrapped(call.integer("dim"), spec.ndim()), size = spec.shape()[dim];
  int64_t index = call.integer("index");
  if (index < -size || index >= size) return std::nullopt;
  if (index < 0) index += size;
  View view(spec);
  for (int64_t d = 0; d < spec.ndim(); ++d) {
    if (d != dim) view.keep(spec, d);
  }
  Strategies strategies = view.strategies();
  const ReduceOp op = spec.dtype() == c10::ScalarType::Bool ? ReduceOp::any : ReduceOp::sum;
  strategies.options.push_back({{Shard(dim)}, {Partial(op)}, 0, /*contiguous=*/true});
  strategies.localize = [dim, index](const ChosenSpecs& chosen) {
    const Spec &base = chosen.inputs[0], &result = chosen.outputs[0];
    const int64_t local_index = index - base.global_offset()[dim];
    const bool is_here = local_index >= 0 && local_index < base.local_shape()[dim];
    LocalCall local;
    if (mesh_dims_of(base, dim).empty()) {
      local.arguments = {{2, local_index}};
      return local;
    }
    local.detached = true;
    local.compute = [=](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      // A copy: what is written through to the base must not show in one rank's part of a sum.
      if (is_here) return Stack{x.select(dim, local_index).clone()};
      return Stack{at::zeros(result.local_shape(), x.options())};
    };
    Placements whole = result.placements();
    for (const int64_t m : mesh_dims_of(base, dim)) whole[m] = Replicate();
    local.write_back = [=, to = result.with_placements(whole, result.order())](const at::Tensor& into,
                                                                               const at::Tensor& written) {
      const at::Tensor value = execute(*cached_plan(result, to), written);
      if (is_here) into.select(dim, local_index).copy_(value);
    };
    return local;
  };
  return strategies;
}

struct Sliced {
  int64_t dim, start, step, count;
};

std::optional<Sliced> slice_of(const OpCall& call, int64_t size, int64_t ndim) {
  const int64_t dim = wrapped(call.integer("dim"), ndim);
  auto bound = [&](const char* name, int64_t missing) {
    int64_t value = call.has(name) ? call.integer(name) : missing;
    if (value < 0) value += size;
    return std::clamp<int64_t>(value, 0, size);
  };
  const int64_t start = bound("start", 0), end = std::max(start, bound("end", size)),
                step = call.integer("step");
  if (step < 1) return std::nullopt;
  return Sliced{dim, start, step, (end - start + step - 1) / step};
}

/// One of the blocks that a strided shard cuts one by one, as the queries among the outputs of a projection
/// to queries, keys and values: each rank has its part of the block.
std::optional<Strategies> block(Strategies strategies, const Spec& spec, const Sliced& slice) {
  const std::vector<int64_t> cutting = mesh_dims_of(spec, slice.dim);
  if (cutting.size() != 1 || slice.step != 1) return std::nullopt;
  const Placement& cut = spec.placement(cutting[0]);
  if (!cut.is_strided_shard()) return std::nullopt;
  const int64_t size = spec.shape()[slice.dim], parts = cut.split() * spec.mesh().shape()[cutting[0]];
  if (size % parts != 0 || slice.count * cut.split() != size || slice.start % slice.count != 0)
    return std::nullopt;
  strategies.options.insert(strategies.options.begin(),
                            Strategy{{cut}, {Shard(slice.dim)}, 0, /*contiguous=*/true});
  const int64_t held = size / parts, start = slice.start / slice.count * held;
  strategies.localize = [=, dim = slice.dim](const ChosenSpecs& chosen) {
    LocalCall local;
    if (!mesh_dims_of(chosen.inputs[0], dim).empty()) local.arguments = {{2, start}, {3, start + held}};
    return local;
  };
  return strategies;
}

/// A range of one dim. Where that is cut, what comes to lie on another rank is sent there.
std::optional<Strategies> sliced(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const int64_t size = spec.shape()[wrapped(call.integer("dim"), spec.ndim())];
  const auto slice = slice_of(call, size, spec.ndim());
  if (!slice) return std::nullopt;
  View view(spec);
  for (int64_t d = 0; d < spec.ndim(); ++d) view.keep(spec, d);
  const bool is_all = slice->count == size;
  view.shape[slice->dim] = slice->count;
  if (!is_all) {
    view.strides[slice->dim] *= slice->step;
    view.output[slice->dim] = kUnsharded;
  }
  Strategies strategies = view.strategies();
  if (is_all) return strategies;
  if (auto of_block = block(strategies, spec, *slice)) return of_block;
  strategies.options.insert(strategies.options.begin(), Strategy{{Shard(slice->dim)}, {Shard(slice->dim)}});
  strategies.localize = [slice = *slice](const ChosenSpecs& chosen) {
    const Spec &base = chosen.inputs[0], &result = chosen.outputs[0];
    LocalCall local;
    if (mesh_dims_of(base, slice.dim).empty()) return local;
    local.communicates = true;
    local.detached = true;
    local.compute = [=](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor(), part = new_memory(result.local_shape(), x.options());
      exchange(part, result, x, base, slice.dim, {{0, 1, slice.start, slice.step, slice.count}});
      return Stack{part};
    };
    local.write_back = [=](const at::Tensor& into, const at::Tensor& written) {
      exchange(into, base, written, result, slice.dim, {{slice.start, slice.step, 0, 1, slice.count}});
    };
    return local;
  };
  return strategies;
}

/// New dims in front, and dims of size 1 repeated.
std::optional<Strategies> expanded(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  Shape sizes = call.integers("size");
  if (static_cast<int64_t>(sizes.size()) < spec.ndim()) return std::nullopt;
  const auto added = static_cast<int64_t>(sizes.size()) - spec.ndim();
  View view(spec);
  for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
    const int64_t size = sizes[dim];
    if (dim >= added && (size == -1 || size == spec.shape()[dim - added])) {
      view.keep(spec, dim - added);
    } else if (size >= 0 && (dim < added || spec.shape()[dim - added] == 1)) {
      view.add(size, 0);
    } else {
      return std::nullopt;
    }
  }
  Strategies strategies = view.strategies();
  strategies.localize = with_local_sizes(1);
  return strategies;
}

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

/// The placements under which each rank holds of the view just what it holds of the tensor; nothing if there
/// are none. A cut of a dim that is not the first of its run takes a part of each block of the joined dim.
///   [4, 6] S(1) as [24]: SS(0, 4)          [24] SS(0, 4) as [4, 6]: S(1)
std::optional<Placements> same_parts(const Spec& spec, const Shape& to) {
  const std::vector<Run> all = runs(spec.shape(), to);
  const auto& mesh = spec.mesh().shape();
  Placements result = spec.placements();
  // What is held once the mesh dims before have cut: shapes of the same elements, in the same order.
  Shape held = spec.shape().vec(), seen = to;
  ShardOrder order = spec.order();
  if (order.empty()) {
    order.resize(mesh.size());
    std::iota(order.begin(), order.end(), 0);
  }
  for (const int64_t m : order) {
    const Placement& now = spec.placement(m);
    if (!now.is_shard_like()) continue;
    const auto cut = static_cast<size_t>(now.dim());
    const auto run = std::find_if(all.begin(), all.end(),
                                  [&](const Run& each) { return each.from <= cut && cut < each.from_end; });
    if (run == all.end()) return std::nullopt;
    const int64_t split = now.is_strided_shard() ? now.split() : 1;
    auto placed = [](size_t dim, int64_t blocks) {
      return blocks == 1 ? Shard(static_cast<int64_t>(dim)) : StridedShard(static_cast<int64_t>(dim), blocks);
    };
    if (run->is_one()) {
      result[m] = placed(run->to, split);
      continue;
    }
    if (held[cut] % (split * mesh[m]) != 0) return std::nullopt;
    auto product = [](const Shape& sizes, size_t begin, size_t end) {
      return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(begin),
                             sizes.begin() + static_cast<std::ptrdiff_t>(end), int64_t{1},
                             std::multiplies<>());
    };
    // Of every `block` elements in a row, each rank takes one part.
    const int64_t block = held[cut] / split * product(held, cut + 1, run->from_end), part = block / mesh[m];
    std::optional<Placement> then;
    for (size_t j = run->to; j < run->to_end && !then; ++j) {
      const int64_t inner = product(seen, j + 1, run->to_end);
      if (part % inner != 0 || seen[j] * inner % block != 0) continue;
      then = placed(j, seen[j] * inner / block);
      seen[j] /= mesh[m];
    }
    if (!then) return std::nullopt;
    result[m] = *then;
    held[cut] /= mesh[m];
  }
  return result;
}

/// Cuts stay where each rank can keep what it has. Else that of the first dim of a run may, on both sides, if
/// it falls on the same elements: where it is even, or the dim keeps its size.
std::optional<Strategies> viewed(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape to = at::infer_size(call.integers("size"), spec.numel());
  const auto from = spec.shape();
  Strategies strategies = moved(Letters(from.size(), kUnsharded), Letters(to.size(), kUnsharded), {to});
  if (const auto strides = at::detail::computeStride(from, spec.strides(), to))
    strategies.results[0].strides.assign(strides->begin(), strides->end());
  strategies.localize = [](const ChosenSpecs& chosen) {
    LocalCall local{{{1, c10::IValue(chosen.outputs[0].local_shape().vec())}}};
    // What a rank holds may lie in memory otherwise than strides say, so that it has to be copied.
    local.compute = [shape = chosen.outputs[0].local_shape().vec()](const c10::OperatorHandle&,
                                                                    Stack arguments) {
      return Stack{arguments[0].toTensor().reshape(shape)};
    };
    local.write_back = [](const at::Tensor& base, const at::Tensor& view) {
      base.copy_(view.view(base.sizes()));
    };
    return local;
  };
  std::vector<Strategy> cuts;
  if (spec.numel() == 0) {
    if (from == c10::IntArrayRef(to)) {
      for (int64_t dim = 0; dim < spec.ndim(); ++dim) cuts.push_back({{Shard(dim)}, {Shard(dim)}});
    }
  } else if (const auto kept = same_parts(spec, to)) {
    for (const size_t m : c10::irange(kept->size())) {
      if (!spec.placement(m).is_shard_like()) continue;
      cuts.push_back({{spec.placement(m)}, {(*kept)[m]}});
      cuts.back().mesh_dim = static_cast<int64_t>(m);
    }
  } else {
    for (const Run& run : runs(from, to)) {
      const int64_t divisor = from[run.from] == to[run.to] ? 0 : std::gcd(from[run.from], to[run.to]);
      cuts.push_back(
          {{Shard(static_cast<int64_t>(run.from))}, {Shard(static_cast<int64_t>(run.to))}, divisor});
    }
  }
  strategies.options.insert(strategies.options.begin(), cuts.begin(), cuts.end());
  return strategies;
}

/// Several views along one dim: by the views they are where it is cut.
std::optional<Strategies> divided(const OpCall& call, const Shape& sizes, bool removed) {
  const Spec& spec = call.tensors[0];
  const int64_t dim = wrapped(call.integer("dim"), spec.ndim());
  if (is_sharded_on(spec, {dim})) {
    Strategies strategies;
    strategies.decompose = composite();
    return strategies;
  }
  View view(spec);
  for (int64_t d = 0; d < spec.ndim(); ++d) {
    if (d != dim || !removed) view.keep(spec, d);
  }
  if (!removed) view.output[dim] = kUnsharded;
  Strategies strategies = view.strategies();
  strategies.results.clear();
  for (const int64_t size : sizes) {
    if (!removed) view.shape[dim] = size;
    strategies.results.push_back({view.shape, view.strides});
  }
  if (sizes.empty()) return std::nullopt;
  return strategies;
}

std::optional<Strategies> split_evenly(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const int64_t step = call.integer("split_size");
  if (spec.ndim() == 0 || step <= 0) return std::nullopt;
  Shape sizes;
  const int64_t size = spec.shape()[wrapped(call.integer("dim"), spec.ndim())];
  for (int64_t begin = 0; begin < size; begin += step) sizes.push_back(std::min(step, size - begin));
  if (sizes.empty()) sizes.push_back(0);
  return divided(call, sizes, false);
}

std::optional<Strategies> split_as_told(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape sizes = call.integers("split_sizes");
  if (spec.ndim() == 0) return std::nullopt;
  if (std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) !=
      spec.shape()[wrapped(call.integer("dim"), spec.ndim())])
    return std::nullopt;
  return divided(call, sizes, false);
}

std::optional<Strategies> unbound(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  return divided(call, Shape(spec.shape()[wrapped(call.integer("dim"), spec.ndim())], 1), true);
}

std::optional<Strategies> diagonal(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const int64_t first = wrapped(call.integer("dim1"), spec.ndim()),
                second = wrapped(call.integer("dim2"), spec.ndim());
  if (first == second) return std::nullopt;
  const int64_t offset = call.integer("offset");
  View view(spec);
  for (int64_t d = 0; d < spec.ndim(); ++d) {
    if (d != first && d != second) view.keep(spec, d);
  }
  const int64_t length = offset >= 0 ? std::min(spec.shape()[first], spec.shape()[second] - offset)
                                     : std::min(spec.shape()[first] + offset, spec.shape()[second]);
  view.add(std::max<int64_t>(length, 0), spec.strides()[first] + spec.strides()[second]);
  return view.strategies();
}

std::optional<Strategies> unfolded(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const int64_t dim = wrapped(call.integer("dimension"), spec.ndim());
  const int64_t size = call.integer("size"), step = call.integer("step");
  if (size < 0 || step <= 0 || size > spec.shape()[dim]) return std::nullopt;
  View view(spec);
  for (int64_t d = 0; d < spec.ndim(); ++d) view.keep(spec, d);
  view.output[dim] = kUnsharded;
  view.shape[dim] = (spec.shape()[dim] - size) / step + 1;
  view.strides[dim] *= step;
  view.add(size, spec.strides()[dim]);
  return view.strategies();
}

/// The last dim, which is whole, becomes the diagonal of two.
std::optional<Strategies> diag_embed(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const int64_t ndim = spec.ndim() + 1, size = spec.shape().back() + std::abs(call.integer("offset"));
  const int64_t one = wrapped(call.integer("dim1"), ndim), other = wrapped(call.integer("dim2"), ndim);
  if (one == other) return std::nullopt;
  Letters input = identity(spec.ndim()), output;
  input.back() = kUnsharded;
  Shape shape;
  int64_t next = 0;
  for (int64_t d = 0; d < ndim; ++d) {
    const bool is_new = d == one || d == other;
    output.push_back(is_new ? kUnsharded : input[next]);
    shape.push_back(is_new ? size : spec.shape()[next]);
    if (!is_new) ++next;
  }
  Einsum einsum{.inputs = {input}, .outputs = {output}, .linear = {{0}}};
  return Strategies{strategies_of(einsum), {{shape}}};
}

/// Windows along a dim, which is whole, are added.
std::optional<Strategies> unfold_backward(const OpCall& call) {
  const Shape sizes = call.integers("input_sizes");
  const auto ndim = static_cast<int64_t>(sizes.size());
  if (ndim == 0 || call.tensors[0].ndim() != ndim + 1) return std::nullopt;
  Letters output = identity(ndim);
  output[wrapped(call.integer("dim"), ndim)] = kUnsharded;
  Letters input = output;
  input.push_back(kUnsharded);
  Einsum einsum{.inputs = {input}, .outputs = {output}, .linear = {{0}}};
  Strategies strategies{strategies_of(einsum), {{sizes}}};
  strategies.localize = with_local_sizes(*call.position("input_sizes"));
  return strategies;
}

/// Its strides speak of the global tensor's memory: laid out so on every rank.
std::optional<Strategies> as_strided(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const bool is_all = c10::IntArrayRef(call.integers("size")) == spec.shape() &&
                      c10::IntArrayRef(call.integers("stride")) == spec.strides() &&
                      (!call.has("storage_offset") || call.integer("storage_offset") == 0);
  Strategies strategies;
  if (is_all) {
    const Letters all = identity(spec.ndim());
    strategies = moved(all, all, {spec.shape().vec(), spec.strides().vec()});
    strategies.localize = [](const ChosenSpecs&) {
      LocalCall local;
      local.compute = [](const c10::OperatorHandle&, Stack arguments) {
        return Stack{arguments[0].toTensor().alias()};
      };
      return local;
    };
    return strategies;
  }
  const int64_t offset = call.has("storage_offset") ? call.integer("storage_offset") : 0;
  strategies = moved(Letters(spec.ndim(), kUnsharded), Letters(call.integers("size").size(), kUnsharded),
                     {call.integers("size"), call.integers("stride")});
  strategies.localize = [spec, offset](const ChosenSpecs&) {
    LocalCall local;
    local.detached = true;
    local.compute = [spec, offset](const c10::OperatorHandle&, Stack arguments) {
      at::Tensor x = arguments[0].toTensor();
      const at::Tensor laid_out = at::empty_strided(spec.shape(), spec.strides(), x.options());
      at::Tensor written = laid_out;
      for (const int64_t dim : c10::irange(spec.ndim())) {
        if (spec.strides()[dim] != 0 || spec.shape()[dim] < 2) continue;
        // All along an expanded dim is one in memory.
        x = x.narrow(dim, 0, 1);
        written = written.narrow(dim, 0, 1);
      }
      written.copy_(x);
      return Stack{laid_out.as_strided(arguments[1].toIntVector(), arguments[2].toIntVector(), offset)};
    };
    return local;
  };
  return strategies;
}

/// Numbers as pairs of numbers, and back.
std::optional<Strategies> as_real(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  View view(spec);
  for (int64_t d = 0; d < spec.ndim(); ++d) {
    view.keep(spec, d);
    view.strides.back() *= 2;
  }
  view.add(2, 1);
  Einsum einsum{.inputs = {view.input}, .outputs = {view.output}, .linear = {{0}}};
  return Strategies{strategies_of(einsum), {{view.shape, view.strides}}};
}
std::optional<Strategies> as_complex(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  View view(spec);
  for (int64_t d = 0; d + 1 < spec.ndim(); ++d) {
    view.keep(spec, d);
    view.strides.back() /= 2;
  }
  view.input[spec.ndim() - 1] = kUnsharded;
  Einsum einsum{.inputs = {view.input}, .outputs = {view.output}, .linear = {{0}}};
  return Strategies{strategies_of(einsum), {{view.shape, view.strides}}};
}

/// What libtorch leaves to later as a mark on the tensor, collectives would not know of: done at once.
std::optional<Strategies> physical(const OpCall& call, at::Tensor (*make)(const at::Tensor&)) {
  const Spec& spec = call.tensors[0];
  const Letters all = identity(spec.ndim());
  Einsum einsum{.inputs = {all}, .outputs = {all}, .linear = {{0}}};
  Strategies strategies{strategies_of(einsum), {{spec.shape().vec(), dense_strides(spec)}}};
  strategies.localize = [make](const ChosenSpecs&) {
    LocalCall local;
    local.detached = true;
    local.compute = [make](const c10::OperatorHandle&, Stack arguments) {
      return Stack{make(arguments[0].toTensor())};
    };
    local.write_back = [make](const at::Tensor& base, const at::Tensor& view) { base.copy_(make(view)); };
    return local;
  };
  return strategies;
}

/// A copy of the first, with the second written where a view of it shows.
std::optional<Strategies> scattered(const OpCall&, at::Tensor (*view)(const at::Tensor&, const Stack&)) {
  Strategies strategies;
  strategies.decompose = [view](const c10::OperatorHandle&, Stack arguments) {
    const at::Tensor result = at::clone(arguments[0].toTensor());
    const at::Tensor target = view(result, arguments), &source = arguments[1].toTensor();
    TESSERA_CHECK(source.sizes() == target.sizes(), "expected a source of the sizes ", target.sizes(),
                  " that it is written to, got ", source.sizes(), ".");
    target.copy_(source);
    return Stack{result};
  };
  return strategies;
}

std::optional<int64_t> optional_integer(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional(value.toInt());
}

/// The gradient of a view: zeros of the input's sizes, but for what the view shows.
std::optional<Strategies> view_backward(const OpCall& call, const Shape& whole, bool dim_removed) {
  const Shape sizes = call.integers("input_sizes");
  const auto ndim = static_cast<int64_t>(sizes.size());
  Letters output = identity(sizes.size()), input;
  for (const int64_t dim : whole) output[dim] = kUnsharded;
  for (int64_t d = 0; d < ndim; ++d) {
    if (!dim_removed || !contains(whole, d)) input.push_back(output[d]);
  }
  if (dim_removed && whole.size() == 2) input.push_back(kUnsharded);
  if (static_cast<int64_t>(input.size()) != call.tensors[0].ndim()) return std::nullopt;
  Einsum einsum{.inputs = {input}, .outputs = {output}, .contracted = std::nullopt, .linear = {{0}}};
  Strategies strategies{strategies_of(einsum), {{sizes}}};
  strategies.localize = with_local_sizes(1);
  return strategies;
}

std::optional<Strategies> slice_backward(const OpCall& call) {
  const Shape sizes = call.integers("input_sizes");
  const auto ndim = static_cast<int64_t>(sizes.size());
  const int64_t dim = wrapped(call.integer("dim"), ndim);
  auto strategies = view_backward(call, {dim}, false);
  const auto slice = slice_of(call, sizes[dim], ndim);
  if (!strategies || !slice) return std::nullopt;
  strategies->options.insert(strategies->options.begin(), Strategy{{Shard(dim)}, {Shard(dim)}});
  strategies->localize = [slice = *slice](const ChosenSpecs& chosen) {
    const Spec &gradient = chosen.inputs[0], &result = chosen.outputs[0];
    LocalCall local{{{1, c10::IValue(result.local_shape().vec())}}};
    if (mesh_dims_of(gradient, slice.dim).empty()) return local;
    local.communicates = true;
    local.compute = [=](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor(), whole = at::zeros(result.local_shape(), x.options());
      exchange(whole, result, x, gradient, slice.dim, {{slice.start, slice.step, 0, 1, slice.count}});
      return Stack{whole};
    };
    return local;
  };
  return strategies;
}

/// Operators that copy what a view shows, of the views of a table as far as libtorch has them ("squeeze.dim":
/// "squeeze_copy.dim"), and of those that have their rule elsewhere.
Entry copies(const Table& views) {
  const std::string aten = "aten::";
  std::vector<std::string> ops{"alias_copy", "detach_copy", "narrow_copy", "_reshape_copy"};
  for (const Entry& entry : views) {
    for (const std::string& view : entry.ops) {
      const size_t dot = view.find('.');
      const c10::OperatorName copy(aten + view.substr(0, dot) + "_copy",
                                   dot == std::string::npos ? "" : view.substr(dot + 1));
      if (c10::Dispatcher::singleton().findSchema(copy))
        ops.push_back(c10::toString(copy).substr(aten.size()));
    }
  }
  return {std::move(ops), composed({"the view", "clone"})};
}

}  // namespace

Table view_rules() {
  Table views{
      {{"t"}, {"ab->ba", transposed}},
      {{"transpose.int"},
       {"two dims swapped",
        [](const OpCall& call) {
          return std::optional(swapped(call, call.integer("dim0"), call.integer("dim1")));
        },
        {"dim0", "dim1"}}},
      {{"permute"},
       {"dims permuted",
        [](const OpCall& call) { return std::optional(permuted(call, call.integers("dims"))); },
        {"dims"}}},
      {{"unsqueeze"}, {"a dim of size 1 added", unsqueezed, {"dim"}}},
      {{"squeeze"},
       {"dims of size 1 dropped",
        [](const OpCall& call) { return squeezed(call, wrapped(Shape(), call.tensors[0].ndim())); }}},
      {{"squeeze.dim", "squeeze.dims"},
       {"dims of size 1 dropped",
        [](const OpCall& call) -> std::optional<Strategies> {
          const Shape dims = call.integers("dim");
          return squeezed(call, dims.empty() ? dims : wrapped(dims, call.tensors[0].ndim()));
        },
        {"dim"}}},
      {{"select.int"},
       {"a dim dropped; if cut, partial: the rank that holds it has it", selected, {"dim", "index"}}},
      {{"slice.Tensor"},
       {"a range of a dim; if cut, what changes its rank is sent", sliced, {"dim", "start", "end", "step"}}},
      {{"expand"}, {"dims of size 1 repeated, dims added", expanded, {"size"}}},
      {{"view", "_unsafe_view", "_reshape_alias"},
       {"dims split and joined; cuts stay where even, strided if not of the first dim joined",
        viewed,
        {"size"}}},
      {{"split.Tensor", "unsafe_split.Tensor"},
       {"ranges of a dim; if cut, by slice", split_evenly, {"split_size", "dim"}}},
      {{"split_with_sizes", "unsafe_split_with_sizes"},
       {"ranges of a dim; if cut, by slice", split_as_told, {"split_sizes", "dim"}}},
      {{"unbind.int"}, {"a dim dropped; if cut, by select", unbound, {"dim"}}},
      {{"diagonal"}, {"two dims whole", diagonal, {"offset", "dim1", "dim2"}}},
      {{"unfold"}, {"the dim whole", unfolded, {"dimension", "size", "step"}}},
      {{"diag_embed"}, {"the last dim whole", diag_embed, {"offset", "dim1", "dim2"}}},
      {{"unfold_backward"}, {"the dim whole", unfold_backward, {"input_sizes", "dim"}}},
      {{"as_strided"},
       {"as it is if it is that, else on replicas", as_strided, {"size", "stride", "storage_offset"}}},
      {{"view_as_real"}, {"ab->ab.", as_real}},
      {{"view_as_complex"}, {"ab.->ab", as_complex}},
      {{"_conj"},
       {"pointwise, linear", [](const OpCall& call) { return physical(call, at::_conj_physical); }}},
      {{"_neg_view"}, {"pointwise, linear", [](const OpCall& call) { return physical(call, at::neg); }}},
      {{"slice_scatter"},
       {"by slice and copy_",
        [](const OpCall& call) {
          return scattered(call, [](const at::Tensor& base, const Stack& given) {
            return base.slice(given[2].toInt(), optional_integer(given[3]), optional_integer(given[4]),
                              given[5].toInt());
          });
        }}},
      {{"select_scatter"},
       {"by select and copy_",
        [](const OpCall& call) {
          return scattered(call, [](const at::Tensor& base, const Stack& given) {
            return base.select(given[2].toInt(), given[3].toInt());
          });
        }}},
      {{"diagonal_scatter"},
       {"by diagonal and copy_",
        [](const OpCall& call) {
          return scattered(call, [](const at::Tensor& base, const Stack& given) {
            return base.diagonal(given[2].toInt(), given[3].toInt(), given[4].toInt());
          });
        }}},
      {{"as_strided_scatter"},
       {"by as_strided and copy_",
        [](const OpCall& call) {
          return scattered(call, [](const at::Tensor& base, const Stack& given) {
            return base.as_strided(given[2].toIntVector(), given[3].toIntVector(),
                                   optional_integer(given[4]));
          });
        }}},
      {{"rot90"}, composed({"flip", "transpose"})},
      {{"select_backward"},
       {"the dim whole",
        [](const OpCall& call) {
          const auto ndim = static_cast<int64_t>(call.integers("input_sizes").size());
          return view_backward(call, {wrapped(call.integer("dim"), ndim)}, true);
        },
        {"input_sizes", "dim"}}},
      {{"slice_backward"},
       {"zeros but for a range; if cut, what changes its rank is sent",
        slice_backward,
        {"input_sizes", "dim", "start", "end", "step"}}},
      {{"diagonal_backward"},
       {"the dims whole",
        [](const OpCall& call) {
          const auto ndim = static_cast<int64_t>(call.integers("input_sizes").size());
          return view_backward(
              call, {wrapped(call.integer("dim1"), ndim), wrapped(call.integer("dim2"), ndim)}, true);
        },
        {"input_sizes", "dim1", "dim2"}}},
  };
  views.push_back(copies(views));
  return views;
}

}  // namespace tessera::ops
