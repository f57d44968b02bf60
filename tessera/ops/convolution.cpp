#include <tessera/kernels/window.h>
#include <tessera/ops/family.h>

#include <algorithm>
#include <memory>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

/// What a call says of the spatial dims, which are those from the third on.
struct Geometry {
  bool transposed = false;
  std::vector<Sliding> windows = {};
  Shape output_padding = {};

  /// Nothing if input and weight do not fit together, which libtorch is to say.
  static std::optional<Geometry> of(const OpCall& call, const Spec& input, const Spec& weight) {
    if (input.ndim() < 3 || input.ndim() != weight.ndim() || input.numel() == 0 || weight.numel() == 0)
      return std::nullopt;
    Geometry result;
    result.transposed = call.flag("transposed");
    const int64_t groups = call.integer("groups");
    const int64_t channels = result.transposed ? weight.shape()[0] : weight.shape()[1] * groups;
    if (groups < 1 || channels != input.shape()[1] || weight.shape()[0] % groups != 0) return std::nullopt;
    const auto count = static_cast<size_t>(input.ndim() - 2);
    const Shape stride = of_each(call, "stride", count), padding = of_each(call, "padding", count),
                dilation = of_each(call, "dilation", count);
    result.output_padding = of_each(call, "output_padding", count);
    for (const Shape* each :
         std::initializer_list<const Shape*>{&stride, &padding, &dilation, &result.output_padding}) {
      if (each->size() != count) return std::nullopt;
    }
    for (const size_t i : c10::irange(count)) {
      result.windows.push_back({weight.shape()[i + 2], stride[i], padding[i], dilation[i]});
      const bool sane = stride[i] > 0 && padding[i] >= 0 && dilation[i] > 0 && result.output_padding[i] >= 0;
      if (!sane || result.size(i, input.shape()[i + 2]) < 1) return std::nullopt;
    }
    return result;
  }

  /// One value for all dims may be given once.
  static Shape of_each(const OpCall& call, std::string_view name, size_t count) {
    Shape values = call.integers(name);
    if (values.size() == 1) values.resize(count, values[0]);
    return values;
  }

  /// Of the result, in spatial dim `i`.
  int64_t size(size_t i, int64_t input) const {
    const Sliding& window = windows[i];
    if (!transposed) return window.size(input);
    return (input - 1) * window.stride - 2 * window.padding + window.extent() + output_padding[i] + 1;
  }

  /// What a range of the result needs of the input.
  Range reach(size_t i, const Range& result) const {
    const Sliding& window = windows[i];
    if (!transposed) return window.reach(result);
    // Input places spread from their own to the extent of the window; rounded so that all is covered.
    const int64_t first = floor_div(result.offset + window.padding - window.extent(), window.stride);
    const int64_t last = -floor_div(-(result.end() - 1 + window.padding), window.stride);
    return {first, last - first + 1};
  }

  /// What the operator makes of a range of the input, without padding: at least what needs it.
  Range cover(const Halo& halo) const {
    const Sliding& window = windows[halo.dim() - 2];
    if (!transposed) return halo.held();
    return {halo.needed().offset * window.stride - window.padding,
            (halo.needed().size - 1) * window.stride + window.extent() + 1};
  }

  Halos halos(const Spec& input, const Spec& result) const {
    std::vector<Reach> reaches;
    for (const size_t i : c10::irange(windows.size()))
      reaches.emplace_back([*this, i](const Range& range) { return reach(i, range); });
    return {input, result, 2, reaches};
  }
};

/// A part of a convolution whose spatial dims are cut: what it is about, and what the rank needs for it.
struct Cut {
  Geometry geometry;
  Halos halos;
  size_t padding, output_padding;  // positions of arguments

  Cut(const OpCall& call, const Geometry& geometry, const Spec& input, const Spec& result)
      : geometry(geometry),
        halos(geometry.halos(input, result)),
        padding(*call.position("padding")),
        output_padding(*call.position("output_padding")) {}

  /// Dims that are cut bring their padding along.
  void put_padding(Stack& arguments) const {
    Shape pads, output_pads;
    for (const size_t i : c10::irange(geometry.windows.size())) {
      const bool cut = halos.of(static_cast<int64_t>(i) + 2);
      pads.push_back(cut ? 0 : geometry.windows[i].padding);
      output_pads.push_back(cut ? 0 : geometry.output_padding[i]);
    }
    arguments[padding] = pads;
    arguments[output_padding] = output_pads;
  }

  Halos::Cover cover() const {
    return [this](const Halo& halo) { return geometry.cover(halo); };
  }
};

/// Groups of which a rank has some channels only.
int64_t local_groups(int64_t groups, const Spec& weight) {
  return groups == 1 ? 1 : groups * weight.local_shape()[0] / weight.shape()[0];
}

/// Where the channels of a weight are.
struct Channels {
  int64_t in, out;
  explicit Channels(bool transposed) : in(transposed ? 0 : 1), out(transposed ? 1 : 0) {}
};

/// Batch, output channels, input channels or groups may be cut; channels evenly, as no rank may have none;
/// spatial dims with halos.
std::optional<Strategies> convolution(const OpCall& call) {
  const auto input = call.tensor("input"), weight = call.tensor("weight"), bias = call.tensor("bias");
  if (!input || !weight) return std::nullopt;
  const Spec &x = call.tensors[*input], &w = call.tensors[*weight];
  const auto geometry = Geometry::of(call, x, w);
  if (!geometry) return std::nullopt;
  const Channels channels(geometry->transposed);
  const int64_t groups = call.integer("groups");
  const int64_t outputs = channels.out == 0 ? w.shape()[0] : w.shape()[1] * groups;
  Shape shape{x.shape()[0], outputs};
  for (const size_t i : c10::irange(geometry->windows.size()))
    shape.push_back(geometry->size(i, x.shape()[i + 2]));
  Strategies strategies;
  strategies.results = {{shape}};
  auto add = [&](Placement of_input, Placement of_weight, Placement of_bias, Placement of_output,
                 int64_t divisor = 0) {
    Strategy strategy{{of_input, of_weight}, {of_output}, divisor};
    if (bias) strategy.inputs.push_back(of_bias);
    strategies.options.push_back(std::move(strategy));
  };
  add(Shard(0), Replicate(), Replicate(), Shard(0));
  if (groups == 1) {
    add(Replicate(), Shard(channels.out), Shard(0), Shard(1), outputs);
    add(Shard(1), Shard(channels.in), Partial(), Partial(), x.shape()[1]);
  } else {
    add(Shard(1), Shard(0), Shard(0), Shard(1), groups);
  }
  if (!bias) add(Partial(), Replicate(), Replicate(), Partial());
  for (int64_t dim = 2; dim < x.ndim(); ++dim) {
    add(Shard(dim), Replicate(), Replicate(), Shard(dim));
    strategies.options.back().contiguous = true;
  }
  strategies.localize = [=, position = *call.position("groups")](const ChosenSpecs& chosen) {
    const Spec& result = chosen.outputs[0];
    LocalCall local{{{position, local_groups(groups, chosen.inputs[1])}}};
    auto cut = std::make_shared<const Cut>(call, *geometry, chosen.inputs[0], result);
    if (cut->halos.empty()) return local;
    local.communicates = cut->halos.communicates();
    local.compute = [cut, result](const c10::OperatorHandle& op, Stack arguments) {
      const at::Tensor x = cut->halos.fetch(arguments[0].toTensor(), 0);
      if (cut->halos.idle()) return Stack{at::zeros(result.local_shape(), x.options())};
      arguments[0] = x;
      cut->put_padding(arguments);
      return Stack{cut->halos.cropped(call_operator(op, std::move(arguments))[0].toTensor(), cut->cover())};
    };
    return local;
  };
  return strategies;
}

std::optional<Strategies> convolution_backward(const OpCall& call) {
  const auto gradient = call.tensor("grad_output"), input = call.tensor("input"),
             weight = call.tensor("weight");
  if (!gradient || !input || !weight) return std::nullopt;
  const Spec &g = call.tensors[*gradient], &x = call.tensors[*input], &w = call.tensors[*weight];
  const auto geometry = Geometry::of(call, x, w);
  if (!geometry || g.ndim() != x.ndim()) return std::nullopt;
  for (const size_t i : c10::irange(geometry->windows.size())) {
    if (g.shape()[i + 2] != geometry->size(i, x.shape()[i + 2])) return std::nullopt;
  }
  const Channels channels(geometry->transposed);
  const int64_t groups = call.integer("groups");
  const Placement r = Replicate(), sum = Partial();
  Strategies strategies;
  strategies.results = {{x.shape().vec()}, {w.shape().vec()}, {{g.shape()[1]}}};
  strategies.options = {{{Shard(0), Shard(0), r}, {Shard(0), sum, sum}}};
  if (groups == 1) {
    strategies.options.push_back(
        {{Shard(1), r, Shard(channels.out)}, {sum, Shard(channels.out), Shard(0)}, g.shape()[1]});
    strategies.options.push_back(
        {{r, Shard(1), Shard(channels.in)}, {Shard(1), Shard(channels.in), r}, x.shape()[1]});
  } else {
    strategies.options.push_back({{Shard(1), Shard(1), Shard(0)}, {Shard(1), Shard(0), Shard(0)}, groups});
  }
  strategies.options.push_back({{sum, r, r}, {sum, sum, sum}});
  for (int64_t dim = 2; dim < x.ndim(); ++dim) {
    strategies.options.push_back({{Shard(dim), Shard(dim), r}, {Shard(dim), sum, sum}});
    strategies.options.back().contiguous = true;
  }
  strategies.localize = [=, of_groups = *call.position("groups"), of_bias = *call.position("bias_sizes"),
                         has_bias = call.has("bias_sizes"),
                         of_mask = *call.position("output_mask")](const ChosenSpecs& chosen) {
    LocalCall local{{{of_groups, local_groups(groups, chosen.inputs[2])}}};
    if (has_bias)
      local.arguments.emplace_back(of_bias, c10::IValue(Shape{chosen.inputs[0].local_shape()[1]}));
    auto cut = std::make_shared<const Cut>(call, *geometry, chosen.inputs[1], chosen.inputs[0]);
    if (cut->halos.empty()) return local;
    local.communicates = cut->halos.communicates();
    local.compute = [cut, of_mask](const c10::OperatorHandle& op, Stack arguments) {
      const auto mask = arguments[of_mask].toBoolList();
      const at::Tensor g = arguments[0].toTensor(), x = arguments[1].toTensor(), w = arguments[2].toTensor();
      const at::Tensor window = mask[1] ? cut->halos.fetch(x, 0) : cut->halos.shaped(x);
      Stack results;
      if (cut->halos.idle()) {
        results = {mask[0] ? at::zeros(window.sizes(), window.options()) : at::Tensor(),
                   mask[1] ? at::zeros_like(w, at::MemoryFormat::Contiguous) : at::Tensor(),
                   mask[2] ? at::zeros({g.size(1)}, g.options()) : at::Tensor()};
      } else {
        arguments[0] = cut->halos.padded(g, cut->cover());
        arguments[1] = window;
        cut->put_padding(arguments);
        results = call_operator(op, std::move(arguments));
      }
      if (mask[0]) results[0] = cut->halos.give_back(results[0].toTensor());
      return results;
    };
    return local;
  };
  return strategies;
}

}  // namespace

Table convolution_rules() {
  const std::vector<std::string> geometry{"stride",     "padding",        "dilation",
                                          "transposed", "output_padding", "groups"};
  auto with_bias = geometry;
  with_bias.emplace_back("bias_sizes");
  return {
      {{"convolution"},
       {"nc..,oc..(,o)->no..; channels evenly, grouped ones by groups; spatial dims with halos", convolution,
        geometry}},
      {{"convolution_backward"},
       {"no..,nc..,oc..->nc..,oc..,o; channels evenly, grouped ones by groups; spatial dims with halos",
        convolution_backward, with_bias}},
  };
}

}  // namespace tessera::ops
