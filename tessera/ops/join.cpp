#include <tessera/kernels/exchange.h>
#include <tessera/ops/family.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>

#include <ATen/ATen.h>

namespace tessera::ops {

namespace {

/// Tensors of one size, cut evenly along the dim in which they are joined: a rank that puts its parts
/// together has a part of each block.
bool joins_blocks(const OpCall& call, int64_t dim) {
  const Spec& first = call.tensors[0];
  const std::vector<int64_t> cutting = mesh_dims_of(first, dim);
  if (cutting.size() != 1 || call.tensors.size() < 2 || first.placement(cutting[0]) != Shard(dim))
    return false;
  return first.shape()[dim] % first.mesh().shape()[cutting[0]] == 0 &&
         std::all_of(call.tensors.begin(), call.tensors.end(), [&](const Spec& spec) {
           return spec.shape() == first.shape() && spec.placements() == first.placements() &&
                  spec.order() == first.order();
         });
}

/// All tensors cut alike. Where they are cut along the dim in which they are joined, each rank joins what it
/// holds if these are blocks; else what comes to lie on another rank is sent there.
std::optional<Strategies> cat(const OpCall& call) {
  // Old habit: empty vectors among others are left out.
  int64_t ndim = 1;
  for (const Spec& spec : call.tensors) ndim = std::max(ndim, spec.ndim());
  for (const Spec& spec : call.tensors) {
    if (spec.ndim() != ndim) return std::nullopt;
  }
  const int64_t dim = wrapped(call.integer("dim"), ndim);
  Shape shape = call.tensors[0].shape().vec();
  shape[dim] = 0;
  for (const Spec& spec : call.tensors) {
    shape[dim] += spec.shape()[dim];
    for (int64_t d = 0; d < ndim; ++d) {
      if (d != dim && spec.shape()[d] != shape[d]) return std::nullopt;
    }
  }
  Strategies strategies = unsharded_dims(call, {dim}, {{shape}});
  Strategy sums;
  sums.inputs.assign(call.tensors.size(), Partial());
  sums.outputs = {Partial()};
  sums.any_partial = true;
  strategies.options.push_back(std::move(sums));
  Strategy cut;
  cut.inputs.assign(call.tensors.size(), Shard(dim));
  if (joins_blocks(call, dim)) {
    cut.outputs = {StridedShard(dim, static_cast<int64_t>(call.tensors.size()))};
    cut.contiguous = true;
    strategies.options.insert(strategies.options.begin(), std::move(cut));
    return strategies;
  }
  cut.outputs = {Shard(dim)};
  strategies.options.insert(strategies.options.begin(), std::move(cut));
  strategies.localize = [dim](const ChosenSpecs& chosen) {
    LocalCall local;
    if (mesh_dims_of(chosen.inputs[0], dim).empty()) return local;
    local.communicates = true;
    local.compute = [dim, chosen](const c10::OperatorHandle&, Stack arguments) {
      const std::vector<at::Tensor> parts = arguments[0].toTensorVector();
      auto dtype = parts[0].scalar_type();
      for (const at::Tensor& part : parts) dtype = c10::promoteTypes(dtype, part.scalar_type());
      const at::Tensor result = new_memory(chosen.outputs[0].local_shape(), parts[0].options().dtype(dtype));
      int64_t offset = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        const int64_t size = chosen.inputs[i].shape()[dim];
        exchange(result, chosen.outputs[0], parts[i].to(dtype), chosen.inputs[i], dim,
                 {{offset, 1, 0, 1, size}});
        offset += size;
      }
      return Stack{result};
    };
    return local;
  };
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

Strategies same_shape(const OpCall& call, const Shape& whole) {
  const Spec& spec = call.tensors[0];
  Letters all = identity(spec.ndim());
  for (const int64_t dim : whole) all[dim] = kUnsharded;
  return moved(all, all, {spec.shape().vec()});
}

/// Along one dim that is cut, what changes its rank is sent.
void exchanged(Strategies& strategies, int64_t dim, std::vector<StridedSegment> segments,
               std::optional<at::Scalar> fill = {}) {
  strategies.options.insert(strategies.options.begin(), Strategy{{Shard(dim)}, {Shard(dim)}});
  strategies.localize = [=](const ChosenSpecs& chosen) {
    LocalCall local;
    const Spec &input = chosen.inputs[0], &output = chosen.outputs[0];
    if (mesh_dims_of(input, dim).empty()) return local;
    local.communicates = true;
    local.compute = [=](const c10::OperatorHandle&, Stack arguments) {
      const at::Tensor x = arguments[0].toTensor();
      const at::Tensor result = fill ? at::full(output.local_shape(), *fill, x.options())
                                     : new_memory(output.local_shape(), x.options());
      exchange(result, output, x, input, dim, segments);
      return Stack{result};
    };
    return local;
  };
}

std::optional<Strategies> flip(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape given = call.integers("dims");
  const Shape dims = given.empty() ? given : wrapped(given, spec.ndim());
  if (spec.ndim() == 0) return same_shape(call, {});
  Strategies strategies = same_shape(call, dims);
  if (dims.size() == 1) {
    const int64_t size = spec.shape()[dims[0]];
    exchanged(strategies, dims[0], {{0, 1, size - 1, -1, size}});
  }
  return strategies;
}

std::optional<Strategies> roll(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape given = call.integers("dims"), shifts = call.integers("shifts");
  if (given.empty() || shifts.size() != given.size()) return std::nullopt;
  const Shape dims = wrapped(given, spec.ndim());
  Strategies strategies = same_shape(call, dims);
  if (dims.size() == 1 && spec.shape()[dims[0]] > 0) {
    const int64_t size = spec.shape()[dims[0]], shift = ((shifts[0] % size) + size) % size;
    exchanged(strategies, dims[0], {{0, 1, size - shift, 1, shift}, {shift, 1, 0, 1, size - shift}});
  }
  return strategies;
}

/// Where the cut dims begin tells which diagonal it is of what a rank holds.
std::optional<Strategies> triangle(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (spec.ndim() < 2) return std::nullopt;
  const Letters all = identity(spec.ndim());
  Einsum einsum{.inputs = {all}, .outputs = {all}, .linear = linear_tensors(call, {{first_argument(call)}})};
  einsum.contiguous = true;
  Strategies strategies{strategies_of(einsum), {{spec.shape().vec()}}};
  strategies.localize = [ndim = spec.ndim(), diagonal = call.integer("diagonal")](const ChosenSpecs& chosen) {
    const auto offset = chosen.inputs[0].global_offset();
    return LocalCall{{{1, diagonal + offset[ndim - 2] - offset[ndim - 1]}}};
  };
  return strategies;
}

/// Padded dims whole, unless only one of them is, with what changes its rank sent.
std::optional<Strategies> pad(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape pads = call.integers("pad");
  if (pads.size() % 2 != 0 || static_cast<int64_t>(pads.size() / 2) > spec.ndim()) return std::nullopt;
  Shape shape = spec.shape().vec(), whole;
  for (size_t i = 0; i < pads.size() / 2; ++i) {
    const int64_t dim = spec.ndim() - 1 - static_cast<int64_t>(i);
    if (pads[2 * i] == 0 && pads[2 * i + 1] == 0) continue;
    shape[dim] += pads[2 * i] + pads[2 * i + 1];
    if (shape[dim] < 0) return std::nullopt;
    whole.push_back(dim);
  }
  Letters all = identity(spec.ndim());
  for (const int64_t dim : whole) all[dim] = kUnsharded;
  const auto value = call.value("value").toScalar();
  Einsum einsum{.inputs = {all}, .outputs = {all}};
  if (value.equal(0)) einsum.linear = linear_tensors(call, {{first_argument(call)}});
  Strategies strategies{strategies_of(einsum), {{shape}}};
  if (whole.size() == 1) {
    const int64_t dim = whole[0], size = spec.shape()[dim];
    const int64_t before = pads[2 * (spec.ndim() - 1 - dim)];
    const int64_t from = std::max<int64_t>(0, -before), to = std::max<int64_t>(0, before);
    const int64_t count = std::min(size - from, shape[dim] - to);
    exchanged(
        strategies, dim,
        count > 0 ? std::vector<StridedSegment>{{to, 1, from, 1, count}} : std::vector<StridedSegment>{},
        value);
  }
  return strategies;
}

/// Dims that are repeated whole, new ones in front.
std::optional<Strategies> repeat(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const Shape repeats = call.integers("repeats");
  const auto added = static_cast<int64_t>(repeats.size()) - spec.ndim();
  if (added < 0) return std::nullopt;
  Letters input = identity(spec.ndim()), output(added, kUnsharded);
  Shape shape(repeats.begin(), repeats.begin() + added);
  for (int64_t d = 0; d < spec.ndim(); ++d) {
    if (repeats[added + d] != 1) input[d] = kUnsharded;
    output.push_back(input[d]);
    shape.push_back(spec.shape()[d] * repeats[added + d]);
  }
  return moved(input, output, {shape});
}

/// As rows of blocks, each between zeros.
Stack block_diagonal(const c10::OperatorHandle&, Stack arguments) {
  std::vector<at::Tensor> blocks = arguments[0].toTensorVector();
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
Stack chunks_side_by_side(const c10::OperatorHandle&, Stack arguments) {
  std::vector<at::Tensor> parts = arguments[0].toTensorVector();
  const int64_t dim = wrapped(arguments[1].toInt(), parts.at(0).dim()), chunks = arguments[2].toInt();
  for (at::Tensor& part : parts) {
    const int64_t size = part.size(dim), padded = (size + chunks - 1) / chunks * chunks;
    Shape pads(2 * (part.dim() - dim), 0), shape(part.sizes().begin(), part.sizes().begin() + dim);
    pads.back() = padded - size;
    shape.insert(shape.end(), {chunks, -1});
    part = at::constant_pad_nd(part, pads).reshape(shape);
  }
  return {at::cat(parts, dim + 1)};
}

/// Whether there are plain tensors in the list: numbers.
bool has_numbers(const OpCall& call) {
  return call.value("tensors").toListRef().size() != call.tensors.size();
}

std::optional<Strategies> block_diag(const OpCall& call) {
  if (has_numbers(call)) return std::nullopt;
  for (const Spec& spec : call.tensors) {
    if (spec.ndim() > 2) return std::nullopt;
  }
  return Strategies{{}, {}, {}, block_diagonal};
}

/// What libtorch refuses is left to it.
std::optional<Strategies> chunk_cat(const OpCall& call) {
  const Spec& first = call.tensors[0];
  if (has_numbers(call) || call.integer("num_chunks") < 1 || first.ndim() == 0) return std::nullopt;
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
  return {
      {{"block_diag"}, {"by constant_pad_nd and cat", block_diag, {"tensors"}}},
      {{"_chunk_cat"}, {"by constant_pad_nd, view and cat", chunk_cat, {"tensors", "dim", "num_chunks"}}},
      {{"cat"}, {"all cut alike; if along the dim, what changes its rank is sent", cat, {"dim"}}},
      {{"stack", "_stack"}, {"ab,ab,...->a.b", stack, {"dim", "tensors"}}},
      {{"flip"}, {"the dims whole; if it is one and cut, what changes its rank is sent", flip, {"dims"}}},
      {{"roll"},
       {"the dims whole; if it is one and cut, what changes its rank is sent", roll, {"dims", "shifts"}}},
      {{"tril", "triu"}, {"any dim cut, with the diagonal of what a rank holds", triangle, {"diagonal"}}},
      {{"constant_pad_nd"},
       {"padded dims whole; if it is one and cut, what changes its rank is sent", pad, {"pad", "value"}}},
      {{"repeat"}, {"repeated dims whole", repeat, {"repeats"}}},
  };
}

}  // namespace tessera::ops
