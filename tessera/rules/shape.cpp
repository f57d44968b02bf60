#include <tessera/rules/shape.h>

#include <algorithm>
#include <numeric>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/irange.h>

namespace tessera::rules {

int64_t wrapped(int64_t dim, int64_t ndim) { return at::maybe_wrap_dim(dim, ndim); }

Shape wrapped(Shape dims, int64_t ndim) {
  if (dims.empty()) {
    dims.resize(ndim);
    std::iota(dims.begin(), dims.end(), 0);
  }
  for (int64_t& dim : dims) dim = wrapped(dim, ndim);
  return dims;
}

bool contains(const Shape& dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

Shape dense_strides(const Spec& spec) {
  const auto strides = local_strides(spec.strides(), spec.shape());
  return {strides.begin(), strides.end()};
}

Shape new_strides(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  if (!call.position("memory_format") || !call.has("memory_format")) return dense_strides(spec);
  switch (call.value("memory_format").toMemoryFormat()) {
    case at::MemoryFormat::Preserve:
      return dense_strides(spec);
    case at::MemoryFormat::ChannelsLast:
      return c10::get_channels_last_strides_2d(spec.shape());
    case at::MemoryFormat::ChannelsLast3d:
      return c10::get_channels_last_strides_3d(spec.shape());
    default:
      return {};
  }
}

std::vector<Result> computed_results(const OpCall& call) {
  const Spec& spec = call.tensors[0];
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(call.schema->name().c_str(),
                                                                 call.schema->overload_name().c_str());
  Stack stack(call.arguments.begin(), call.arguments.end());
  stack[call.positions[0]] =
      at::empty_strided(spec.shape(), spec.strides(), at::TensorOptions(spec.dtype()).device(at::kMeta));
  for (const size_t i : c10::irange(stack.size())) {
    // Throws if the key under which op plans are cached lacks it.
    if (!stack[i].isTensor()) call.value(call.schema->arguments()[i].name());
  }
  op.callBoxed(stack);
  std::vector<Result> results;
  auto add = [&](const at::Tensor& tensor) {
    results.push_back({tensor.sizes().vec(), tensor.strides().vec()});
  };
  for (const c10::IValue& result : stack) {
    if (result.isTensor()) add(result.toTensor());
    if (!result.isTensorList()) continue;
    for (const at::Tensor& each : result.toTensorVector()) add(each);
  }
  return results;
}

bool is_sharded_on(const Spec& spec, const Shape& dims) {
  return std::any_of(spec.placements().begin(), spec.placements().end(), [&](const Placement& placement) {
    return placement.is_shard_like() && contains(dims, placement.dim());
  });
}

double local_share(const Spec& spec, const Shape& dims) {
  double share = 1;
  for (const int64_t dim : dims) {
    if (spec.shape()[dim] > 0)
      share *= static_cast<double>(spec.local_shape()[dim]) / static_cast<double>(spec.shape()[dim]);
  }
  return share;
}

Letters broadcast(c10::IntArrayRef shape, c10::IntArrayRef target, const Letters& letters) {
  const size_t missing = target.size() - shape.size();
  Letters result;
  for (size_t i = 0; i < shape.size(); ++i)
    result.push_back(shape[i] == target[missing + i] ? letters[missing + i] : kUnsharded);
  return result;
}

}  // namespace tessera::rules
