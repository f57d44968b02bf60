#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/kernels/exchange.h>
#include <tessera/ops/composites.h>
#include <tessera/ops/family.h>
#include <tessera/redistribute/execute.h>
#include <tessera/redistribute/plan_cache.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

// --- some dims of size 1 dropped

/// A rank might have just 1 of a dim that is larger, and must not drop it: it makes a view of its own sizes.
Localize squeezed(const OpCall& call) {
  const auto shape = call.tensors[0].shape();
  const auto ndim = static_cast<int64_t>(shape.size());
  Shape dims = call.position("dim") ? call.integers("dim") : wrapped(Shape(), ndim);
  if (ndim == 0) dims.clear();
  Shape dropped, kept;
  for (const int64_t dim : dims) {
    const int64_t at = wrapped(dim, ndim);
    (shape[at] == 1 ? dropped : kept).push_back(at);
  }
  return [dropped, kept](const ChosenSpecs& chosen) {
    LocalCall local;
    const auto local_shape = chosen.inputs[0].local_shape();
    if (std::none_of(kept.begin(), kept.end(), [&](int64_t d) { return local_shape[d] == 1; })) return local;
    local.compute = [dropped](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = self_tensor(arguments);
      Shape sizes, strides;
      for (const int64_t d : c10::irange(x.dim())) {
        if (contains(dropped, d)) continue;
        sizes.push_back(x.size(d));
        strides.push_back(x.stride(d));
      }
      return Stack{x.as_strided(sizes, strides)};
    };
    return local;
  };
}

Rule squeeze() {
  Rule rule = DimMap{.dropped = {"dim"}, .only_ones = true, .is_view = true};
  rule.local.of = squeezed;
  return rule;
}

// --- an index of a dim

/// Where `dim` is sharded: the rank that has the index computes the result, the others zeros.
Localize on_rank_of(int64_t dim, int64_t index, size_t position) {
  return [=](const ChosenSpecs& chosen) {
    const Spec &base = chosen.inputs[0], &result = chosen.outputs[0];
    const int64_t local_index = index - base.global_offset()[dim];
    const bool is_here = local_index >= 0 && local_index < base.local_shape()[dim];
    const auto mesh_dims = mesh_dims_of(base, dim);
    LocalCall local;
    if (mesh_dims.empty()) {
      local.arguments = {{position, local_index}};
      return local;
    }
    local.detached = true;
    local.compute = [=](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = self_tensor(arguments);
      // A copy: what is written into the base must not show in one rank's partial values.
      if (is_here) return Stack{x.select(dim, local_index).clone()};
      return Stack{at::zeros(result.local_shape(), x.options())};
    };
    Placements reduced = result.placements();
    for (const int64_t m : mesh_dims) reduced[m] = Replicate();
    local.write_back = [=, to = result.with_placements(reduced, result.order())](const at::Tensor& into,
                                                                                 const at::Tensor& written) {
      const at::Tensor value = execute(*cached_plan(result, to), written);
      if (is_here) into.select(dim, local_index).copy_(value);
    };
    return local;
  };
}

std::optional<Strategies> select(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const int64_t dim = wrapped(call.integer("dim"), spec.ndim()), size = spec.shape()[dim];
  int64_t index = call.integer("index");
  if (index < -size || index >= size) return std::nullopt;
  if (index < 0) index += size;
  auto strategies = propose(DimMap{.dropped = {"dim"}, .is_view = true}, call);
  const ReduceOp op = spec.dtype() == at::kBool ? ReduceOp::any : ReduceOp::sum;
  Strategy partial{{Shard(dim)}, {Partial(op)}};
  partial.contiguous = true;
  strategies->options.push_back(std::move(partial));
  strategies->localize = on_rank_of(dim, index, *call.position("index"));
  return strategies;
}

// --- a range of a dim

struct Slice {
  int64_t dim, start, step, count;

  /// Nothing if the step is not positive, which libtorch is to say.
  static std::optional<Slice> of(const OpCall& call, c10::IntArrayRef shape) {
    const int64_t dim = wrapped(call.integer("dim"), static_cast<int64_t>(shape.size())), size = shape[dim];
    auto bound = [&](const char* name, int64_t missing) {
      int64_t value = call.has(name) ? call.integer(name) : missing;
      if (value < 0) value += size;
      return std::clamp<int64_t>(value, 0, size);
    };
    const int64_t start = bound("start", 0), end = std::max(start, bound("end", size)),
                  step = call.integer("step");
    if (step < 1) return std::nullopt;
    return Slice{dim, start, step, (end - start + step - 1) / step};
  }

  /// From the tensor to the slice, and back.
  StridedSegment taken() const { return {0, 1, start, step, count}; }
  StridedSegment put_back() const { return {start, step, 0, 1, count}; }
};

/// One of the blocks of a strided shard, as the queries among the outputs of a projection to queries, keys
/// and values: each rank has its shard of the block.
bool takes_block(Strategies& strategies, const OpCall& call, const Slice& slice) {
  const Spec& spec = call.tensors[0];
  const std::vector<int64_t> mesh_dims = mesh_dims_of(spec, slice.dim);
  if (mesh_dims.size() != 1 || slice.step != 1) return false;
  const Placement& strided = spec.placement(mesh_dims[0]);
  if (!strided.is_strided_shard()) return false;
  const int64_t size = spec.shape()[slice.dim], pieces = strided.split() * spec.mesh().shape()[mesh_dims[0]];
  if (size % pieces != 0 || slice.count * strided.split() != size || slice.start % slice.count != 0)
    return false;
  Strategy block{{strided}, {Shard(slice.dim)}};
  block.contiguous = true;
  strategies.options.insert(strategies.options.begin(), std::move(block));
  const int64_t piece = size / pieces, start = slice.start / slice.count * piece;
  strategies.localize = [=, dim = slice.dim, of_start = *call.position("start"),
                         of_end = *call.position("end")](const ChosenSpecs& chosen) {
    LocalCall local;
    if (!mesh_dims_of(chosen.inputs[0], dim).empty())
      local.arguments = {{of_start, start}, {of_end, start + piece}};
    return local;
  };
  return true;
}

std::optional<Strategies> slice(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() == 0) return std::nullopt;
  const auto slice = Slice::of(call, spec.shape());
  if (!slice) return std::nullopt;
  if (slice->count == spec.shape()[slice->dim]) return propose(DimMap{.is_view = true}, call);
  auto strategies = propose(DimMap{.unsharded = {"dim"}, .is_view = true}, call);
  if (takes_block(*strategies, call, *slice)) return strategies;
  strategies->options.insert(strategies->options.begin(), Strategy{{Shard(slice->dim)}, {Shard(slice->dim)}});
  strategies->localize = [slice = *slice](const ChosenSpecs& chosen) {
    LocalCall local = exchanged(slice.dim, {slice.taken()})(chosen);
    if (!local.compute) return local;
    local.detached = true;
    local.write_back = [=, base = chosen.inputs[0], result = chosen.outputs[0]](const at::Tensor& into,
                                                                                const at::Tensor& written) {
      exchange(into, base, written, result, slice.dim, {slice.put_back()});
    };
    return local;
  };
  return strategies;
}

/// Zeros, but for the range.
Rule slice_backward() {
  Rule rule(DimMap{.unsharded = {"dim"}, .sizes = "input_sizes", .exchanges = true},
            {"start", "end", "step"});
  rule.local.of = [](const OpCall& call) -> Localize {
    const auto slice = Slice::of(call, call.integers("input_sizes"));
    if (!slice) return {};
    return [exchange = exchanged(slice->dim, {slice->put_back()}, 0),
            position = *call.position("input_sizes")](const ChosenSpecs& chosen) {
      LocalCall local = exchange(chosen);
      if (!local.compute) local.arguments = {{position, c10::IValue(chosen.outputs[0].local_shape().vec())}};
      return local;
    };
  };
  return rule;
}

// --- the others

/// Several views along `dim`: by the views they are where it is sharded.
DimMap ranges_of_dim() {
  return {.unsharded = {"dim"}, .is_view = true, .if_sharded = Decomposition{{"slice"}, composite()}};
}
DimMap indices_of_dim() {
  return {.dropped = {"dim"}, .is_view = true, .if_sharded = Decomposition{{"select"}, composite()}};
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
        return Stack{self_tensor(arguments).alias()};
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
    local.compute = [spec, offset](const c10::OperatorHandle& op, Stack arguments) {
      const NamedArguments named(op, arguments);
      at::Tensor x = named.tensor("self");
      const at::Tensor laid_out = at::empty_strided(spec.shape(), spec.strides(), x.options());
      at::Tensor written = laid_out;
      for (const int64_t dim : c10::irange(spec.ndim())) {
        if (spec.strides()[dim] != 0 || spec.shape()[dim] < 2) continue;
        // All along an expanded dim is one in memory.
        x = x.narrow(dim, 0, 1);
        written = written.narrow(dim, 0, 1);
      }
      written.copy_(x);
      return Stack{laid_out.as_strided(named["size"].toIntVector(), named["stride"].toIntVector(), offset)};
    };
    return local;
  };
  return strategies;
}

/// What libtorch leaves to later as a mark on the tensor, collectives would not know of: done at once.
Rule at_once(at::Tensor (*make)(const at::Tensor&)) {
  Rule rule = Pointwise{.linear = {{"self"}}, .integers = true};
  rule.local = {"computed at once", [make](const OpCall&) -> Localize {
                  return [make](const ChosenSpecs&) {
                    LocalCall local;
                    local.detached = true;
                    local.compute = [make](const c10::OperatorHandle&, Stack arguments) {
                      return Stack{make(self_tensor(arguments))};
                    };
                    local.write_back = [make](const at::Tensor& base, const at::Tensor& view) {
                      base.copy_(make(view));
                    };
                    return local;
                  };
                }};
  return rule;
}

using MakeView = at::Tensor (*)(const at::Tensor& base, const NamedArguments& arguments);

/// A copy of `self`, with `src` written where a view of it shows; `name`: of the view's operator.
Decomposition scattered(const char* name, MakeView view) {
  return {{name, "copy_"}, [view](const c10::OperatorHandle& op, Stack stack) {
            const NamedArguments arguments(op, stack);
            const at::Tensor result = at::clone(arguments.tensor("self"));
            const at::Tensor target = view(result, arguments), &source = arguments.tensor("src");
            TESSERA_CHECK(source.sizes() == target.sizes(), op.schema().name(),
                          ": expected a source of sizes ", target.sizes(), ", got ", source.sizes(), ".");
            target.copy_(source);
            return Stack{result};
          }};
}

at::Tensor slice_of(const at::Tensor& base, const NamedArguments& a) {
  return base.slice(a["dim"].toInt(), a["start"].toOptional<int64_t>(), a["end"].toOptional<int64_t>(),
                    a["step"].toInt());
}
at::Tensor index_of(const at::Tensor& base, const NamedArguments& a) {
  return base.select(a["dim"].toInt(), a["index"].toInt());
}
at::Tensor diagonal_of(const at::Tensor& base, const NamedArguments& a) {
  return base.diagonal(a["offset"].toInt(), a["dim1"].toInt(), a["dim2"].toInt());
}
at::Tensor strided_of(const at::Tensor& base, const NamedArguments& a) {
  return base.as_strided(a["size"].toIntVector(), a["stride"].toIntVector(),
                         a["storage_offset"].toOptional<int64_t>());
}

/// Operators that copy what a view shows, of the views of a table as far as libtorch has them ("squeeze.dim":
/// "squeeze_copy.dim"), and of those that have their rule elsewhere.
Table copies(const Table& views) {
  Table result;
  const auto add = [&](const std::string& view, const std::string& overload) {
    const std::string copy = view + "_copy" + (overload.empty() ? "" : "." + overload);
    result.push_back({{copy}, composed({view, "clone"})});
  };
  for (const char* view : {"alias", "detach", "narrow"}) add(view, "");
  result.push_back({{"_reshape_copy"}, composed({"reshape", "clone"})});
  for (const Entry& entry : views) {
    for (const std::string& op : entry.ops) {
      const size_t dot = op.find('.');
      const std::string view = op.substr(0, dot),
                        overload = dot == std::string::npos ? "" : op.substr(dot + 1);
      if (c10::Dispatcher::singleton().findSchema({"aten::" + view + "_copy", overload})) add(view, overload);
    }
  }
  return result;
}

}  // namespace

Table view_rules() {
  Table views{
      {{"t"}, Pattern{.letters = {"ab->ba", "a->a", "->"}, .moves = true, .is_view = true}},
      {{"transpose.int"}, DimMap{.swapped = {"dim0", "dim1"}, .is_view = true}},
      {{"permute"}, DimMap{.order = "dims", .is_view = true}},
      {{"unsqueeze"}, DimMap{.added = {"dim"}, .is_view = true}},
      {{"squeeze", "squeeze.dim", "squeeze.dims"}, squeeze()},
      {{"select.int"},
       {"`dim` dropped; if sharded: P(sum), of the rank that has the index",
        select,
        {"dim", "index"},
        "which rank has the result depends on the index"}},
      {{"slice.Tensor"},
       {"`dim` unsharded; or sharded: what changes its rank is exchanged, blocks of strided shards stay",
        slice,
        {"dim", "start", "end", "step"},
        "whether a range is all of a dim, or a block of a strided shard, depends on its bounds"}},
      {{"expand"}, Rule(DimMap{.resizes = true, .sizes = "size", .is_view = true}, {"implicit"})},
      {{"view", "_unsafe_view", "_reshape_alias"}, Reshape{}},
      {{"split.Tensor", "unsafe_split.Tensor"}, Rule(ranges_of_dim(), {"split_size"})},
      {{"split_with_sizes", "unsafe_split_with_sizes"}, Rule(ranges_of_dim(), {"split_sizes"})},
      {{"unbind.int"}, indices_of_dim()},
      {{"diagonal"}, Rule(DimMap{.dropped = {"dim1", "dim2"}, .last_added = 1, .is_view = true}, {"offset"})},
      {{"unfold"},
       Rule(DimMap{.unsharded = {"dimension"}, .last_added = 1, .is_view = true}, {"size", "step"})},
      {{"diag_embed"}, DimMap{.added = {"dim1", "dim2"}, .last_dropped = 1, .linear = true}},
      {{"unfold_backward"},
       DimMap{.unsharded = {"dim"}, .last_dropped = 1, .sizes = "input_sizes", .linear = true}},
      {{"as_strided"},
       {"as it is if that is all of it, else replicated",
        as_strided,
        {"size", "stride", "storage_offset"},
        "strides are those of the global tensor's memory"}},
      {{"view_as_real"}, Pattern{.letters = {"B->B."}, .linear = {{"self"}}, .is_view = true}},
      {{"view_as_complex"}, Pattern{.letters = {"B.->B"}, .linear = {{"self"}}, .is_view = true}},
      {{"_conj"}, at_once(at::_conj_physical)},
      {{"_neg_view"}, at_once(at::neg)},
      {{"slice_scatter"}, scattered("slice", slice_of)},
      {{"select_scatter"}, scattered("select", index_of)},
      {{"diagonal_scatter"}, scattered("diagonal", diagonal_of)},
      {{"as_strided_scatter"}, scattered("as_strided", strided_of)},
      {{"rot90"}, composed({"flip", "transpose"})},
      {{"select_backward"}, DimMap{.added = {"dim"}, .sizes = "input_sizes"}},
      {{"slice_backward"}, slice_backward()},
      {{"diagonal_backward"},
       DimMap{.added = {"dim1", "dim2"}, .last_dropped = 1, .sizes = "input_sizes", .linear = true}},
  };
  const Table of_views = copies(views);
  views.insert(views.end(), of_views.begin(), of_views.end());
  return views;
}

}  // namespace tessera::ops

// --- composites

namespace tessera {

namespace {

/// By view, whose sizes are global; libtorch's way is to say the strides too, which no rank's memory has.
at::Tensor reshape(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  const auto shape = at::infer_size(C10_AS_INTARRAYREF_SLOW(sizes), self.numel());
  if (at::detail::computeStride(self.sizes(), self.strides(), c10::IntArrayRef(shape)))
    return self.view(shape);
  return at::_unsafe_view(self.clone(at::MemoryFormat::Contiguous), shape);
}

std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& indices_or_sections,
                                     int64_t dim) {
  // A scalar tensor or a list, which is checked there as ever.
  const at::Tensor value = full_of(indices_or_sections.detach());
  if (!DTensor::is_dtensor(self) || value.dim() > 1 || value.scalar_type() != at::kLong)
    return at::tensor_split(full_of(self), value, dim);
  const std::vector<int64_t> numbers = integers_of(value);
  return value.dim() == 0 ? at::tensor_split(self, numbers[0], dim) : at::tensor_split(self, numbers, dim);
}

void register_view_composites(torch::Library& library) {
  library.impl("reshape", reshape);
  library.impl("tensor_split.tensor_indices_or_sections", tensor_split);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse3, library) { register_view_composites(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) { register_view_composites(library); }

}  // namespace

}  // namespace tessera
