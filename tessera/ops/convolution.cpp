#include <tessera/kernels/convolution.h>
#include <tessera/ops/family.h>

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>

namespace tessera::ops {

namespace {

/// A value for each spatial dim; one may be given for all.
Shape each_of(const OpCall& call, std::string_view name, size_t count) {
  Shape values = call.integers(name);
  if (values.size() == 1) values.resize(count, values[0]);
  return values;
}

/// Nothing if input and weight do not fit together, which libtorch is to say.
std::optional<ConvolutionGeometry> geometry_of(const OpCall& call, const Spec& input, const Spec& weight) {
  if (input.ndim() < 3 || input.ndim() != weight.ndim() || input.numel() == 0 || weight.numel() == 0)
    return std::nullopt;
  ConvolutionGeometry result;
  result.transposed = call.flag("transposed");
  const int64_t groups = call.integer("groups");
  const int64_t channels = result.transposed ? weight.shape()[0] : weight.shape()[1] * groups;
  if (groups < 1 || channels != input.shape()[1] || weight.shape()[0] % groups != 0) return std::nullopt;
  const auto count = static_cast<size_t>(input.ndim() - 2);
  const Shape stride = each_of(call, "stride", count), padding = each_of(call, "padding", count),
              dilation = each_of(call, "dilation", count),
              output_padding = each_of(call, "output_padding", count);
  for (const Shape* each : {&stride, &padding, &dilation, &output_padding}) {
    if (each->size() != count) return std::nullopt;
  }
  result.output_padding = output_padding;
  for (const size_t i : c10::irange(count)) {
    result.windows.push_back({weight.shape()[i + 2], stride[i], padding[i], dilation[i]});
    const bool sane = stride[i] > 0 && padding[i] >= 0 && dilation[i] > 0 && output_padding[i] >= 0;
    if (!sane || result.size(i, input.shape()[i + 2]) < 1) return std::nullopt;
  }
  return result;
}

/// The groups of which a rank has the channels.
int64_t local_groups(int64_t groups, const Spec& weight) {
  return groups == 1 ? 1 : groups * weight.local_shape()[0] / weight.shape()[0];
}

/// Which dims of a weight are the channels.
struct Channels {
  int64_t in, out;
  explicit Channels(bool transposed) : in(transposed ? 0 : 1), out(transposed ? 1 : 0) {}
};

Localize forward_step(const OpCall& call, const ConvolutionGeometry& geometry) {
  return [=, groups = call.integer("groups"),
          position = *call.position("groups")](const ChosenSpecs& chosen) {
    LocalCall local{{{position, local_groups(groups, chosen.inputs[1])}}};
    auto sharded = std::make_shared<const ShardedConvolution>(geometry, chosen.inputs[0], chosen.outputs[0]);
    if (sharded->halos().empty()) return local;
    local.communicates = sharded->halos().communicates();
    local.compute = [sharded](const c10::OperatorHandle& op, Stack arguments) {
      return sharded->forward(op, std::move(arguments));
    };
    return local;
  };
}

std::optional<Strategies> convolution(const OpCall& call) {
  const auto input = call.tensor("input"), weight = call.tensor("weight"), bias = call.tensor("bias");
  if (!input || !weight) return std::nullopt;
  const Spec &x = call.tensors[*input], &w = call.tensors[*weight];
  const auto geometry = geometry_of(call, x, w);
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
  // Channels evenly: no rank may be without any.
  add(Shard(0), Replicate(), Replicate(), Shard(0));
  if (groups == 1) {
    add(Replicate(), Shard(channels.out), Shard(0), Shard(1), outputs);
    add(Shard(1), Shard(channels.in), Partial(), Partial(), x.shape()[1]);
  } else {
    add(Shard(1), Shard(0), Shard(0), Shard(1), groups);
  }
  if (!bias) add(Partial(), Replicate(), Replicate(), Partial());
  for (const int64_t dim : c10::irange(2, x.ndim())) {
    add(Shard(dim), Replicate(), Replicate(), Shard(dim));
    strategies.options.back().contiguous = true;
  }
  strategies.localize = forward_step(call, *geometry);
  return strategies;
}

Localize backward_step(const OpCall& call, const ConvolutionGeometry& geometry) {
  return
      [=, groups = call.integer("groups"), of_groups = *call.position("groups"),
       of_bias = *call.position("bias_sizes"), has_bias = call.has("bias_sizes")](const ChosenSpecs& chosen) {
        const Spec &gradient = chosen.inputs[0], &input = chosen.inputs[1], &weight = chosen.inputs[2];
        LocalCall local{{{of_groups, local_groups(groups, weight)}}};
        if (has_bias) local.arguments.emplace_back(of_bias, c10::IValue(Shape{gradient.local_shape()[1]}));
        auto sharded = std::make_shared<const ShardedConvolution>(geometry, input, gradient);
        if (sharded->halos().empty()) return local;
        local.communicates = sharded->halos().communicates();
        local.compute = [sharded](const c10::OperatorHandle& op, Stack arguments) {
          return sharded->backward(op, std::move(arguments));
        };
        return local;
      };
}

std::optional<Strategies> convolution_backward(const OpCall& call) {
  const auto gradient = call.tensor("grad_output"), input = call.tensor("input"),
             weight = call.tensor("weight");
  if (!gradient || !input || !weight) return std::nullopt;
  const Spec &g = call.tensors[*gradient], &x = call.tensors[*input], &w = call.tensors[*weight];
  const auto geometry = geometry_of(call, x, w);
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
  for (const int64_t dim : c10::irange(2, x.ndim())) {
    strategies.options.push_back({{Shard(dim), Shard(dim), r}, {Shard(dim), sum, sum}});
    strategies.options.back().contiguous = true;
  }
  strategies.localize = backward_step(call, *geometry);
  return strategies;
}

}  // namespace

Table convolution_rules() {
  const Names geometry{"stride", "padding", "dilation", "transposed", "output_padding", "groups"};
  Names with_bias = geometry;
  with_bias.emplace_back("bias_sizes");
  const char* why = "which channels may be sharded depends on the groups, and on whether it is transposed";
  return {
      {{"convolution"},
       {"nc..,oc..,o?->no..; channels evenly, grouped ones by groups; spatial dims with halos", convolution,
        geometry, why}},
      {{"convolution_backward"},
       {"no..,nc..,oc..->nc..,oc..,o; channels evenly, grouped ones by groups; spatial dims with halos",
        convolution_backward, with_bias, why}},
  };
}

}  // namespace tessera::ops
