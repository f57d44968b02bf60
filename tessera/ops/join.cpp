#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>
#include <tessera/ops/plain_gradients.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace tessera::ops {

namespace {

/// Tensors of one size, sharded evenly along the dim in which they are joined: a rank that joins its shards
/// has a shard of each block.
bool joins_blocks(const OpCall& call, int64_t dim) {
  const Spec& first = call.tensors[0];
  const std::vector<int64_t> mesh_dims = mesh_dims_of(first, dim);
  if (mesh_dims.size() != 1 || call.tensors.size() < 2 || first.placement(mesh_dims[0]) != Shard(dim))
    return false;
  return first.shape()[dim] % first.mesh().shape()[mesh_dims[0]] == 0 &&
         std::all_of(call.tensors.begin(), call.tensors.end(), [&](const Spec& spec) {
           return spec.shape() == first.shape() && spec.placements() == first.placements() &&
                  spec.order() == first.order();
         });
}

/// The shape of the tensors joined along `dim`; nothing if they do not fit together. libtorch leaves out
/// empty vectors among others: those are left to it.
std::optional<Shape> joined_shape(const OpCall& call, int64_t dim) {
  Shape shape = call.tensors[0].shape().vec();
  shape[dim] = 0;
  for (const Spec& spec : call.tensors) {
    shape[dim] += spec.shape()[dim];
    for (const int64_t d : c10::irange(spec.ndim())) {
      if (d != dim && spec.shape()[d] != shape[d]) return std::nullopt;
    }
  }
  return shape;
}

/// What of each tensor comes to lie on another rank is sent there.
Localize joined_by_exchange(int64_t dim) {
  return [dim](const ChosenSpecs& chosen) {
    LocalCall local;
    if (mesh_dims_of(chosen.inputs[0], dim).empty()) return local;
    local.communicates = true;
    local.compute = [dim, chosen](const c10::OperatorHandle& op, Stack arguments) {
      const std::vector<at::Tensor> tensors = NamedArguments(op, arguments)["tensors"].toTensorVector();
      auto dtype = tensors[0].scalar_type();
      for (const at::Tensor& each : tensors) dtype = c10::promoteTypes(dtype, each.scalar_type());
      const at::Tensor result =
          new_memory(chosen.outputs[0].local_shape(), tensors[0].options().dtype(dtype));
      int64_t offset = 0;
      for (const size_t i : c10::irange(tensors.size())) {
        const int64_t size = chosen.inputs[i].shape()[dim];
        exchange(result, chosen.outputs[0], tensors[i].to(dtype), chosen.inputs[i], dim,
                 {{offset, 1, 0, 1, size}});
        offset += size;
      }
      return Stack{result};
    };
    return local;
  };
}

std::optional<Strategies> cat(const OpCall& call) {
  int64_t ndim = 1;
  for (const Spec& spec : call.tensors) ndim = std::max(ndim, spec.ndim());
  for (const Spec& spec : call.tensors) {
    if (spec.ndim() != ndim) return std::nullopt;
  }
  const int64_t dim = wrapped(call.integer("dim"), ndim);
  const auto shape = joined_shape(call, dim);
  if (!shape) return std::nullopt;
  Strategies strategies = unsharded_dims(call, {dim}, {{*shape}});
  const size_t count = call.tensors.size();
  Strategy partial{Placements(count, Partial()), {Partial()}};
  partial.any_partial = true;
  strategies.options.push_back(std::move(partial));
  Strategy sharded{Placements(count, Shard(dim)), {Shard(dim)}};
  if (joins_blocks(call, dim)) {
    sharded.outputs = {StridedShard(dim, static_cast<int64_t>(count))};
    sharded.contiguous = true;
  } else {
    strategies.localize = joined_by_exchange(dim);
  }
  strategies.options.insert(strategies.options.begin(), std::move(sharded));
  return strategies;
}

std::optional<Strategies> stack(const OpCall& call) {
  const Spec& first = call.tensors[0];
  for (const Spec& spec : call.tensors) {
    if (spec.shape() != first.shape()) return std::nullopt;
  }
  const int64_t dim = wrapped(call.integer("dim"), first.ndim() + 1);
  const Letters all = identity(first.ndim());
  Einsum einsum;
  einsum.inputs.assign(call.tensors.size(), all);
  einsum.keeps_all = true;
  Letters output = all;
  output.insert(output.begin() + dim, kUnsharded);
  einsum.outputs = {output};
  const size_t count = call.value("tensors").toListRef().size();
  if (count != call.tensors.size()) return std::nullopt;
  Shape shape = first.shape().vec();
  shape.insert(shape.begin() + dim, static_cast<int64_t>(count));
  return Strategies{strategies_of(einsum), {{shape}}};
}

/// Elements change positions along `dims`; `segments`: along one of them, of that size.
Rule along_dims(bool empty_is_all, Names reads,
                const std::function<std::vector<StridedSegment>(const OpCall&, int64_t size)>& segments) {
  Rule rule(DimMap{.unsharded = {"dims"}, .exchanges = true, .empty_is_all = empty_is_all}, std::move(reads));
  rule.local.of = [=](const OpCall& call) -> Localize {
    const Spec& spec = call.tensors[0];
    Shape dims = call.integers("dims");
    if (empty_is_all) dims = wrapped(dims, spec.ndim());
    // What libtorch refuses is left to it.
    const bool fits = !call.position("shifts") || call.integers("shifts").size() == 1;
    if (dims.size() != 1 || spec.numel() == 0 || spec.ndim() == 0 || !fits) return {};
    const int64_t dim = wrapped(dims[0], spec.ndim());
    return exchanged(dim, segments(call, spec.shape()[dim]));
  };
  return rule;
}

std::vector<StridedSegment> flipped(const OpCall&, int64_t size) { return {{0, 1, size - 1, -1, size}}; }

std::vector<StridedSegment> rolled(const OpCall& call, int64_t size) {
  const int64_t given = call.integers("shifts")[0], shift = ((given % size) + size) % size;
  return {{0, 1, size - shift, 1, shift}, {shift, 1, 0, 1, size - shift}};
}

/// Of which diagonal a rank keeps what is on one side follows from where its shard begins.
Rule triangle() {
  Rule rule(Pattern{.letters = {"Bmn->Bmn"}, .linear = {{"self"}}, .contiguous = "mn"}, {"diagonal"});
  rule.local = {"`diagonal` as it is in the shard", [](const OpCall& call) -> Localize {
                  return [diagonal = call.integer("diagonal"),
                          position = *call.position("diagonal")](const ChosenSpecs& chosen) {
                    const auto offset = chosen.inputs[0].global_offset();
                    const size_t ndim = offset.size();
                    return LocalCall{{{position, diagonal + offset[ndim - 2] - offset[ndim - 1]}}};
                  };
                }};
  return rule;
}

/// Padded dims are unsharded; a single one may be sharded, with what changes its rank exchanged.
std::optional<Strategies> pad(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape pads = call.integers("pad");
  if (pads.size() % 2 != 0 || static_cast<int64_t>(pads.size() / 2) > spec.ndim()) return std::nullopt;
  Shape shape = spec.shape().vec(), padded;
  Letters all = identity(spec.ndim());
  for (const size_t i : c10::irange(pads.size() / 2)) {
    const int64_t dim = spec.ndim() - 1 - static_cast<int64_t>(i);
    if (pads[2 * i] == 0 && pads[2 * i + 1] == 0) continue;
    shape[dim] += pads[2 * i] + pads[2 * i + 1];
    if (shape[dim] < 0) return std::nullopt;
    padded.push_back(dim);
    all[dim] = kUnsharded;
  }
  const auto value = call.value("value").toScalar();
  Einsum einsum{.inputs = {all}, .outputs = {all}};
  if (value.equal(0) || padded.empty()) {
    einsum.keeps_all = true;  // zeros are what any reduction of them leaves
  } else {
    einsum.kept = {ReduceOp::avg, ReduceOp::max, ReduceOp::min};
  }
  Strategies strategies{strategies_of(einsum), {{shape}}};
  if (padded.size() != 1) return strategies;
  const int64_t dim = padded[0], size = spec.shape()[dim], before = pads[2 * (spec.ndim() - 1 - dim)];
  const int64_t from = std::max<int64_t>(0, -before), to = std::max<int64_t>(0, before);
  const int64_t count = std::min(size - from, shape[dim] - to);
  std::vector<StridedSegment> segments;
  if (count > 0) segments.push_back({to, 1, from, 1, count});
  strategies.options.insert(strategies.options.begin(), Strategy{{Shard(dim)}, {Shard(dim)}});
  strategies.localize = exchanged(dim, std::move(segments), value);
  return strategies;
}

/// As rows of blocks, each between zeros.
Stack block_diagonal(const c10::OperatorHandle& op, Stack arguments) {
  std::vector<at::Tensor> blocks = NamedArguments(op, arguments)["tensors"].toTensorVector();
  int64_t columns = 0, before = 0;
  for (at::Tensor& block : blocks) {
    if (block.dim() < 2) block = block.view({1, block.numel()});
    columns += block.size(1);
  }
  for (at::Tensor& block : blocks) {
    const int64_t width = block.size(1);
    block = at::constant_pad_nd(block, {before, columns - before - width});
    before += width;
  }
  return {at::cat(blocks)};
}

/// Each padded along the dim to that many chunks of equal size, which then are rows side by side.
Stack chunks_side_by_side(const c10::OperatorHandle& op, Stack stack) {
  const NamedArguments arguments(op, stack);
  std::vector<at::Tensor> tensors = arguments["tensors"].toTensorVector();
  const int64_t dim = wrapped(arguments["dim"].toInt(), tensors.at(0).dim()),
                chunks = arguments["num_chunks"].toInt();
  for (at::Tensor& each : tensors) {
    const int64_t size = each.size(dim), padded = (size + chunks - 1) / chunks * chunks;
    Shape pads(2 * (each.dim() - dim), 0), shape(each.sizes().begin(), each.sizes().begin() + dim);
    pads.back() = padded - size;
    shape.insert(shape.end(), {chunks, -1});
    each = at::constant_pad_nd(each, pads).reshape(shape);
  }
  return {at::cat(tensors, dim + 1)};
}

/// Whether there are plain scalar tensors in the list.
bool has_plain_scalars(const OpCall& call) {
  return call.value("tensors").toListRef().size() != call.tensors.size();
}

std::optional<Strategies> block_diag(const OpCall& call) {
  if (has_plain_scalars(call)) return std::nullopt;
  for (const Spec& spec : call.tensors) {
    if (spec.ndim() > 2) return std::nullopt;
  }
  return Strategies{{}, {}, {}, block_diagonal};
}

/// What libtorch refuses is left to it.
std::optional<Strategies> chunk_cat(const OpCall& call) {
  const Spec& first = call.tensors[0];
  if (has_plain_scalars(call) || call.integer("num_chunks") < 1 || first.ndim() == 0) return std::nullopt;
  const int64_t given = call.integer("dim"), dim = wrapped(given, first.ndim());
  for (const Spec& spec : call.tensors) {
    const bool fits = spec.numel() > 0 && spec.dtype() == first.dtype() && spec.ndim() > dim &&
                      (given >= 0 || spec.ndim() == first.ndim()) &&
                      spec.shape().slice(0, dim) == first.shape().slice(0, dim);
    if (!fits) return std::nullopt;
  }
  return Strategies{{}, {}, {}, chunks_side_by_side};
}

}  // namespace

Table join_rules() {
  constexpr bool kEmptyIsAll = true;
  return {
      {{"block_diag"},
       {"by constant_pad_nd and cat",
        block_diag,
        {"tensors"},
        "plain scalar tensors cannot be padded with the rest"}},
      {{"_chunk_cat"},
       {"by constant_pad_nd, view and cat",
        chunk_cat,
        {"tensors", "dim", "num_chunks"},
        "lists that libtorch refuses are left to it"}},
      {{"cat"},
       {"all sharded alike; if along `dim`, even shards become strided, others are exchanged",
        cat,
        {"dim"},
        "whether shards become strided depends on how all tensors are sharded"}},
      {{"stack", "_stack"},
       {"all sharded alike, `dim` added",
        stack,
        {"dim", "tensors"},
        "any number of tensors, among which plain scalar tensors are not partial"}},
      {{"flip"}, along_dims(!kEmptyIsAll, {}, flipped)},
      {{"roll"}, along_dims(kEmptyIsAll, {"shifts"}, rolled)},
      {{"tril", "triu"}, triangle()},
      {{"constant_pad_nd"},
       {"padded dims unsharded; one alone may be sharded: what changes its rank is exchanged",
        pad,
        {"pad", "value"},
        "which dims are padded, and whether it is linear, depends on values"}},
      {{"repeat"}, Rule(DimMap{.resizes = true}, {"repeats"})},
  };
}

}  // namespace tessera::ops

// --- autograd

namespace tessera {

namespace {

using c10::IValue;
using torch::jit::Stack;

/// Without dims and elements, tensors are left out of what is joined.
bool is_left_out(const at::Tensor& tensor) {
  return tensor.dim() == 1 && tensor.size(0) == 0 && tensor.requires_grad();
}

void cat(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  IValue& list = (*stack)[stack->size() - 2];
  const at::List<at::Tensor> given = list.toTensorList();
  if (at::GradMode::is_enabled() && std::any_of(given.begin(), given.end(), is_left_out)) {
    std::vector<at::Tensor> tensors = given.vec();
    for (at::Tensor& tensor : tensors) {
      if (is_left_out(tensor)) tensor = with_distributed_gradient(tensor);
    }
    list = std::move(tensors);
  }
  call_autograd_formula(op, keys, stack);
}

/// The gradient of what is repeated no times is zeros.
void repeat(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const IValue& repeats = stack->back();
  IValue& self = (*stack)[stack->size() - 2];
  const auto sizes = repeats.toListRef();
  const bool is_none = std::any_of(sizes.begin(), sizes.end(),
                                   [](const IValue& size) { return size.isInt() && size.toInt() == 0; });
  if (at::GradMode::is_enabled() && is_none) self = with_distributed_gradient(self.toTensor());
  call_autograd_formula(op, keys, stack);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  library.impl("cat", torch::CppFunction::makeFromBoxedFunction<&cat>());
  library.impl("repeat", torch::CppFunction::makeFromBoxedFunction<&repeat>());
}

}  // namespace

}  // namespace tessera
