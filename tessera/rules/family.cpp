#include <tessera/rules/family.h>

#include <algorithm>
#include <numeric>

#include <ATen/WrapDimUtils.h>
#include <c10/core/MemoryFormat.h>

namespace tessera::rules {

Table tried(Table table) {
  for (Entry& entry : table) entry.rule.can_be_tried = true;
  return table;
}

bool not_floating(Dtypes dtypes) { return !at::isFloatingType(dtypes[0]); }

bool different_floats(Dtypes dtypes) {
  return std::any_of(dtypes.begin(), dtypes.end(), [&](at::ScalarType each) {
    return each != dtypes[0] && !at::isIntegralType(each, /*includeBool=*/true);
  });
}

bool not_one_float(Dtypes dtypes) { return not_floating(dtypes) || different_floats(dtypes); }

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

Shape new_strides(const Call& call) {
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

bool is_cut(const Spec& spec, const Shape& dims) {
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
    result.push_back(shape[i] == target[missing + i] ? letters[missing + i] : kWhole);
  return result;
}

Stack call_operator(const c10::OperatorHandle& op, Stack arguments) {
  op.callBoxed(arguments);
  return arguments;
}

Function composite() {
  return [](const c10::OperatorHandle& op, Stack arguments) {
    constexpr auto usual = c10::DispatchKey::CompositeExplicitAutograd;
    op.callBoxedForDispatchKey(
        op.hasKernelForDispatchKey(usual) ? usual : c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
        arguments);
    return arguments;
  };
}

Rule composed(std::string text) {
  return {std::move(text), [](const Call&) { return std::optional(Proposal{{}, {}, {}, composite()}); }};
}

std::function<Local(const Chosen&)> with_local_sizes(size_t position) {
  return [position](const Chosen& chosen) {
    return Local{{{position, c10::IValue(chosen.outputs[0].local_shape().vec())}}};
  };
}

Proposal moved(Letters input, Letters output, Result result) {
  Einsum einsum;
  einsum.inputs = {std::move(input)};
  einsum.outputs = {std::move(output)};
  einsum.contracted = std::nullopt;
  einsum.keeps_all = true;
  return {rows(einsum), {std::move(result)}};
}

Proposal like_first(const Call& call) {
  const Spec& spec = call.tensors[0];
  const Letters all = identity(spec.ndim());
  Proposal proposal = moved(all, all, {spec.shape().vec(), new_strides(call)});
  for (Row& row : proposal.rows) {
    if (row.outputs[0].is_partial()) row.outputs[0] = Replicate();
  }
  return proposal;
}

bool is_index(const c10::IValue& item) { return item.isTensor() && item.toTensor().defined(); }

Proposal whole_dims(const Call& call, const Shape& dims, std::vector<Result> results) {
  Einsum einsum;
  const auto ndim = static_cast<size_t>(call.tensors[0].ndim());
  Letters all = identity(ndim);
  for (const int64_t dim : dims) all[dim] = kWhole;
  einsum.inputs.assign(call.tensors.size(), all);
  einsum.outputs.assign(results.size(), all);
  return {rows(einsum), std::move(results)};
}

}  // namespace tessera::rules
