#include <tessera/ops/family.h>

#include <algorithm>

namespace tessera::ops {

Table tried(Table table) {
  for (Entry& entry : table) entry.rule.can_be_tried = true;
  return table;
}

Rule for_loss_parallel(Rule rule) {
  rule.for_loss_parallel = true;
  return rule;
}

bool not_floating(Dtypes dtypes) { return !at::isFloatingType(dtypes[0]); }

bool different_floats(Dtypes dtypes) {
  return std::any_of(dtypes.begin(), dtypes.end(), [&](at::ScalarType each) {
    return each != dtypes[0] && !at::isIntegralType(each, /*includeBool=*/true);
  });
}

bool not_one_float(Dtypes dtypes) { return not_floating(dtypes) || different_floats(dtypes); }

Function composite() {
  return [](const c10::OperatorHandle& op, Stack arguments) {
    constexpr auto usual = c10::DispatchKey::CompositeExplicitAutograd;
    op.callBoxedForDispatchKey(
        op.hasKernelForDispatchKey(usual) ? usual : c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
        arguments);
    return arguments;
  };
}

Rule composed(Names by) { return Decomposition{std::move(by), composite()}; }

const std::string& first_argument(const OpCall& call) { return call.schema->arguments()[0].name(); }

Strategies moved(Letters input, Letters output, Result result) {
  Einsum einsum;
  einsum.inputs = {std::move(input)};
  einsum.outputs = {std::move(output)};
  einsum.contracted = std::nullopt;
  einsum.keeps_all = true;
  return {strategies_of(einsum), {std::move(result)}};
}

bool is_index(const c10::IValue& item) { return item.isTensor() && item.toTensor().defined(); }

Strategies unsharded_dims(const OpCall& call, const Shape& dims, std::vector<Result> results) {
  Einsum einsum;
  const auto ndim = static_cast<size_t>(call.tensors[0].ndim());
  Letters all = identity(ndim);
  for (const int64_t dim : dims) all[dim] = kUnsharded;
  einsum.inputs.assign(call.tensors.size(), all);
  einsum.outputs.assign(results.size(), all);
  return {strategies_of(einsum), std::move(results)};
}

}  // namespace tessera::ops
