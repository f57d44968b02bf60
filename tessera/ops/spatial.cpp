#include <tessera/kernels/window.h>
#include <tessera/ops/planes.h>
#include <tessera/redistribute/memory.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

/// Padding with what is there: mirrored at the ends, or the ends repeated.
Separable padding(int64_t inner, bool reflects) {
  auto maps = [=](const OpCall& call, c10::IntArrayRef sizes) -> std::optional<std::vector<LinearMap>> {
    const Shape pads = call.integers("padding");
    if (static_cast<int64_t>(pads.size()) != 2 * inner) return std::nullopt;
    std::vector<LinearMap> all;
    for (const int64_t i : c10::irange(inner)) {
      const int64_t size = sizes[i], before = pads[2 * (inner - 1 - i)],
                    after = pads[2 * (inner - 1 - i) + 1];
      if (size < 1 || before < 0 || after < 0) return std::nullopt;
      if (reflects && std::max(before, after) >= size) return std::nullopt;
      all.push_back({before + size + after, [=](int64_t result) -> Taps {
                       const int64_t place = result - before, last = size - 1;
                       if (!reflects) return {{std::clamp<int64_t>(place, 0, last)}};
                       return {{last - std::abs(last - std::abs(place))}};
                     }});
    }
    return all;
  };
  return {"cut along batch and channels; spatial dims with halos", inner, /*copies=*/true, maps, {"padding"}};
}

/// "nc..,npq.->ncpq": the grid tells where to look in each image.
std::optional<Strategies> grid_sampler(const OpCall& call) {
  if (call.tensors.size() != 2) return std::nullopt;
  const Spec &x = call.tensors[0], &grid = call.tensors[1];
  if (x.ndim() < 4 || x.ndim() != grid.ndim() || x.numel() == 0 || grid.numel() == 0) return std::nullopt;
  const auto inner = static_cast<size_t>(x.ndim() - 2);
  Letters image = letters("nc"), places = letters("n"), output = image;
  Shape shape{x.shape()[0], x.shape()[1]};
  for (size_t i = 0; i < inner; ++i) {
    image.push_back(kUnsharded);
    places.push_back(static_cast<char>('p' + i));
    output.push_back(places.back());
    shape.push_back(grid.shape()[i + 1]);
  }
  places.push_back(kUnsharded);
  Einsum einsum{.inputs = {image, places}, .outputs = {output}, .linear = {{0}}};
  return Strategies{strategies_of(einsum), {{shape}}};
}

/// "ncpq,nc..,npq.->nc..,npq."
std::optional<Strategies> grid_sampler_backward(const OpCall& call) {
  if (call.tensors.size() != 3) return std::nullopt;
  const Spec &x = call.tensors[1], &grid = call.tensors[2];
  if (x.ndim() < 4 || x.ndim() != grid.ndim() || x.numel() == 0 || grid.numel() == 0) return std::nullopt;
  const auto inner = static_cast<size_t>(x.ndim() - 2);
  Letters image = letters("nc"), places = letters("n"), output = image;
  for (size_t i = 0; i < inner; ++i) {
    image.push_back(kUnsharded);
    places.push_back(static_cast<char>('p' + i));
    output.push_back(places.back());
  }
  places.push_back(kUnsharded);
  Einsum einsum{.inputs = {output, image, places}, .outputs = {image, places}, .linear = {{0}}};
  return Strategies{strategies_of(einsum), {{x.shape().vec()}, {grid.shape().vec()}}};
}

/// Dims that are cut in the input and the result where both are cut evenly: `blocks` of each is how many
/// parts there may be at the most, and divides both; 0: the dim is the same in both.
std::optional<Strategies> in_blocks(const OpCall& call, const Shape& shape, const Shape& blocks) {
  Strategies strategies;
  strategies.results = {{shape}};
  for (size_t d = 0; d < blocks.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    strategies.options.push_back({Placements(call.tensors.size(), Shard(dim)), {Shard(dim)}, blocks[d]});
  }
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
    strategies.options.push_back({{Partial(op)}, {Partial(op)}});
  return strategies;
}

/// Blocks of channels become, or are made of, blocks of places.
std::optional<Strategies> pixel_shuffle(const OpCall& call, bool back) {
  const Spec& x = call.tensors[0];
  const int64_t factor = call.integer(back ? "downscale_factor" : "upscale_factor"), n = x.ndim();
  if (n < 3 || factor < 1 || x.numel() == 0) return std::nullopt;
  Shape shape = x.shape().vec(), blocks(n, 0);
  if (back ? shape[n - 1] % factor || shape[n - 2] % factor : shape[n - 3] % (factor * factor))
    return std::nullopt;
  shape[n - 3] = back ? shape[n - 3] * factor * factor : shape[n - 3] / (factor * factor);
  for (const int64_t d : {n - 2, n - 1}) shape[d] = back ? shape[d] / factor : shape[d] * factor;
  for (int64_t d = n - 3; d < n; ++d) blocks[d] = std::min(shape[d], x.shape()[d]);
  auto strategies = in_blocks(call, shape, blocks);
  strategies->localize = [](const ChosenSpecs& chosen) {
    LocalCall local;
    if (c10::multiply_integers(chosen.inputs[0].local_shape()) > 0) return local;
    // libtorch leaves the shape of what is empty as it is.
    local.compute = [result = chosen.outputs[0]](const c10::OperatorHandle&, Stack arguments) {
      return Stack{new_memory(result.local_shape(), arguments[0].toTensor().options())};
    };
    return local;
  };
  return strategies;
}

/// Windows as columns, which count row by row: batch and channels cut; rows with halos, and as many for each
/// rank.
std::optional<Strategies> columns(const OpCall& call, bool back) {
  const Spec& x = call.tensors[0];
  const int64_t outer = x.ndim() - (back ? 2 : 3), height = outer + 1;
  if ((outer != 0 && outer != 1) || x.numel() == 0) return std::nullopt;
  const Shape kernel = call.integers("kernel_size"), stride = call.integers("stride"),
              padding = call.integers("padding"), dilation = call.integers("dilation");
  const Shape sizes = back ? call.integers("output_size") : Shape{x.shape()[height], x.shape()[height + 1]};
  for (const Shape* each : {&kernel, &stride, &padding, &dilation, &sizes}) {
    if (each->size() != 2) return std::nullopt;
  }
  Shape windows;
  for (const size_t i : {0, 1}) {
    if (kernel[i] < 1 || stride[i] < 1 || padding[i] < 0 || dilation[i] < 1) return std::nullopt;
    windows.push_back(Sliding{kernel[i], stride[i], padding[i], dilation[i]}.size(sizes[i]));
  }
  const int64_t area = kernel[0] * kernel[1], given = x.shape()[outer], count = windows[0] * windows[1];
  if (count < 1 || (back && (given % area != 0 || x.shape()[height] != count))) return std::nullopt;
  Shape shape(x.shape().begin(), x.shape().begin() + outer), blocks(outer + 1, 0);
  shape.push_back(back ? given / area : given * area);
  blocks[outer] = back ? given / area : given;
  blocks.push_back(windows[0]);
  Shape by_rows = shape;  // what the columns are, as rows of windows
  by_rows[outer] = back ? given : shape[outer];
  by_rows.insert(by_rows.end(), windows.begin(), windows.end());
  const Shape places = back ? sizes : Shape{count};
  shape.insert(shape.end(), places.begin(), places.end());
  auto strategies = in_blocks(call, shape, blocks);
  strategies->localize = [=, of_padding = *call.position("padding"),
                          of_size = call.position("output_size")](const ChosenSpecs& chosen) {
    const Spec &image = back ? chosen.outputs[0] : chosen.inputs[0],
               &made = back ? chosen.inputs[0] : chosen.outputs[0];
    const Spec rows(made.mesh(), made.placements(), by_rows, std::nullopt, made.dtype(), made.order());
    const Sliding window{kernel[0], stride[0], padding[0], dilation[0]};
    auto halos = std::make_shared<const Halos>(
        image, rows, height,
        std::vector<Reach>{[window](const Range& range) { return window.reach(range); }});
    LocalCall local;
    if (halos->empty()) return local;
    local.communicates = halos->communicates();
    local.compute = [=](const c10::OperatorHandle& op, Stack arguments) {
      arguments[of_padding] = Shape{0, padding[1]};  // rows bring theirs along
      if (!back) {
        arguments[0] = halos->fetch(arguments[0].toTensor(), 0);
        return call_operator(op, std::move(arguments));
      }
      arguments[*of_size] = Shape{halos->of(height)->needed().size, sizes[1]};
      return Stack{halos->give_back(call_operator(op, std::move(arguments))[0].toTensor())};
    };
    return local;
  };
  return strategies;
}

}  // namespace

Table spatial_rules() {
  constexpr bool kForward = false, kBackward = true, kReflects = true;
  return {
      {{"channel_shuffle"},
       {"channels whole",
        [](const OpCall& call) -> std::optional<Strategies> {
          const Spec& spec = call.tensors[0];
          if (spec.ndim() < 3 || spec.numel() == 0) return std::nullopt;
          return unsharded_dims(call, {1}, {{spec.shape().vec()}});
        }}},
      {{"grid_sampler_2d", "grid_sampler_3d"}, {"nc..,npq.->ncpq", grid_sampler}},
      {{"grid_sampler_2d_backward", "grid_sampler_3d_backward"},
       {"ncpq,nc..,npq.->nc..,npq.", grid_sampler_backward}},
      {{"pixel_shuffle"},
       {"batch cut; channels and places evenly",
        [](const OpCall& call) { return pixel_shuffle(call, kForward); },
        {"upscale_factor"}}},
      {{"pixel_unshuffle"},
       {"batch cut; channels and places evenly",
        [](const OpCall& call) { return pixel_shuffle(call, kBackward); },
        {"downscale_factor"}}},
      {{"im2col"},
       {"batch cut; channels evenly; rows of windows evenly, with halos",
        [](const OpCall& call) { return columns(call, kForward); },
        {"kernel_size", "stride", "padding", "dilation"}}},
      {{"col2im"},
       {"batch cut; channels evenly; rows of windows evenly, with halos",
        [](const OpCall& call) { return columns(call, kBackward); },
        {"kernel_size", "stride", "padding", "dilation", "output_size"}}},
      {{"reflection_pad1d"}, separable(padding(1, kReflects))},
      {{"reflection_pad2d"}, separable(padding(2, kReflects))},
      {{"reflection_pad3d"}, separable(padding(3, kReflects))},
      {{"reflection_pad1d_backward"}, separable_backward(padding(1, kReflects))},
      {{"reflection_pad2d_backward"}, separable_backward(padding(2, kReflects))},
      {{"reflection_pad3d_backward"}, separable_backward(padding(3, kReflects))},
      {{"replication_pad1d"}, separable(padding(1, !kReflects))},
      {{"replication_pad2d"}, separable(padding(2, !kReflects))},
      {{"replication_pad3d"}, separable(padding(3, !kReflects))},
      {{"replication_pad1d_backward"}, separable_backward(padding(1, !kReflects))},
      {{"replication_pad2d_backward"}, separable_backward(padding(2, !kReflects))},
      {{"replication_pad3d_backward"}, separable_backward(padding(3, !kReflects))},
  };
}

}  // namespace tessera::ops
