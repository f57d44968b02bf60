#include <tessera/kernels/call.h>
#include <tessera/kernels/convolution.h>

#include <ATen/ATen.h>
#include <c10/util/irange.h>

namespace tessera::kernels {

namespace {

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

Halos halos_of(const ConvolutionGeometry& geometry, const Spec& input, const Spec& output) {
  std::vector<Reach> reaches;
  for (const size_t i : c10::irange(geometry.windows.size()))
    reaches.emplace_back([geometry, i](const Range& range) { return geometry.reach(i, range); });
  return {input, output, 2, reaches};
}

}  // namespace

int64_t ConvolutionGeometry::size(size_t i, int64_t input) const {
  const Sliding& window = windows[i];
  if (!transposed) return window.size(input);
  return (input - 1) * window.stride - 2 * window.padding + window.extent() + output_padding[i] + 1;
}

Range ConvolutionGeometry::reach(size_t i, const Range& output) const {
  const Sliding& window = windows[i];
  if (!transposed) return window.reach(output);
  // Input positions spread from their own to the extent of the window; rounded so that all is covered.
  const int64_t first = floor_div(output.offset + window.padding - window.extent(), window.stride);
  const int64_t last = -floor_div(-(output.end() - 1 + window.padding), window.stride);
  return {first, last - first + 1};
}

Range ConvolutionGeometry::cover(const Halo& halo) const {
  const Sliding& window = windows[halo.dim() - 2];
  if (!transposed) return halo.local();
  return {halo.needed().offset * window.stride - window.padding,
          (halo.needed().size - 1) * window.stride + window.extent() + 1};
}

ShardedConvolution::ShardedConvolution(ConvolutionGeometry geometry, const Spec& input, const Spec& output)
    : geometry_(std::move(geometry)),
      halos_(halos_of(geometry_, input, output)),
      output_shape_(output.local_shape().vec()) {}

/// Dims that are sharded bring their padding along.
void ShardedConvolution::put_padding(const c10::OperatorHandle& op, Stack& arguments) const {
  std::vector<int64_t> pads, output_pads;
  for (const size_t i : c10::irange(geometry_.windows.size())) {
    const bool is_sharded = halos_.of(static_cast<int64_t>(i) + 2);
    pads.push_back(is_sharded ? 0 : geometry_.windows[i].padding);
    output_pads.push_back(is_sharded ? 0 : geometry_.output_padding[i]);
  }
  const NamedArguments named(op, arguments);
  named["padding"] = pads;
  named["output_padding"] = output_pads;
}

Halos::Cover ShardedConvolution::cover() const {
  return [this](const Halo& halo) { return geometry_.cover(halo); };
}

Stack ShardedConvolution::forward(const c10::OperatorHandle& op, Stack arguments) const {
  c10::IValue& input = NamedArguments(op, arguments)["input"];
  const at::Tensor x = halos_.fetch(input.toTensor(), 0);
  if (halos_.idle()) return {at::zeros(output_shape_, x.options())};
  input = x;
  put_padding(op, arguments);
  return {halos_.cropped(call_operator(op, std::move(arguments))[0].toTensor(), cover())};
}

Stack ShardedConvolution::backward(const c10::OperatorHandle& op, Stack arguments) const {
  const NamedArguments named(op, arguments);
  const auto mask = named["output_mask"].toBoolList();
  const bool of_input = mask[0], of_weight = mask[1], of_bias = mask[2];
  const at::Tensor gradient = named.tensor("grad_output"), x = named.tensor("input"),
                   weight = named.tensor("weight");
  const at::Tensor seen = of_weight ? halos_.fetch(x, 0) : halos_.shaped(x);
  Stack results;
  if (halos_.idle()) {
    results = {of_input ? at::zeros(seen.sizes(), seen.options()) : at::Tensor(),
               of_weight ? at::zeros_like(weight, at::MemoryFormat::Contiguous) : at::Tensor(),
               of_bias ? at::zeros({gradient.size(1)}, gradient.options()) : at::Tensor()};
  } else {
    named["grad_output"] = halos_.padded(gradient, cover());
    named["input"] = seen;
    put_padding(op, arguments);
    op.callBoxed(arguments);
    results = std::move(arguments);
  }
  if (of_input) results[0] = halos_.give_back(results[0].toTensor());
  return results;
}

}  // namespace tessera::kernels
