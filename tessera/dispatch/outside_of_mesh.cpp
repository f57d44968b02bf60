#include <tessera/dispatch/outside_of_mesh.h>
#include <tessera/error.h>
#include <tessera/rules/choose.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

using c10::IValue;

/// The arguments, with tensors that have shapes but no values.
Stack on_meta(Stack arguments) {
  const auto meta = [](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  };
  for (IValue& value : arguments) {
    if (value.isTensor()) {
      value = meta(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = meta(tensor);
      value = std::move(tensors);
    } else if (value.isDevice()) {
      value = at::Device(at::kMeta);
    }
  }
  return arguments;
}

/// What the operator returns, as meta tensors; nothing if it cannot say without values.
Stack meta_results(const OperatorInfo& info, const Stack& all) {
  const auto& returns = info.schema.returns();
  if (returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::BoolType) return {true};
  Stack results = on_meta(all);
  try {
    info.op.callBoxed(results);
  } catch (const c10::NotImplementedError&) {
    return {};
  }
  const bool are_known = std::all_of(results.begin(), results.end(), [](const IValue& value) {
    return value.isTensor() || value.isTensorList() || value.isBool();
  });
  return are_known ? results : Stack();
}

/// How the ranks of the mesh place each result; none if the rule does not say.
std::vector<Placements> result_placements(const ResolvedRule& resolved, const rules::OpCall& call) {
  std::vector<Placements> result;
  if (!resolved.rule) return result;
  try {
    const auto chosen = rules::choose(*resolved.rule, call, std::vector<int64_t>(call.positions.size(), -1));
    if (chosen && !chosen->decompose) {
      for (const auto& output : chosen->outputs) result.push_back(output.placements);
    }
  } catch (const c10::Error&) {  // it asks what this rank holds
  }
  return result;
}

}  // namespace

void run_outside_of_mesh(const OperatorInfo& info, const ResolvedRule& resolved, Arguments& arguments) {
  const DistributedArgument& first = arguments.distributed()[0];
  const DeviceMesh& mesh = first.spec().mesh();
  const Stack all = arguments.with_tensors();
  Stack results = meta_results(info, all);
  TESSERA_CHECK(results.size() == info.schema.returns().size(), info.name, ": rank ", mesh.get_rank(),
                " is not in ", mesh, " of ranks ", c10::IntArrayRef(mesh.ranks()),
                ", so it cannot compute on tensors there; ask mesh.is_member() first.");
  const auto placements = result_placements(resolved, arguments.call(all));
  size_t index = 0;
  const auto without_elements = [&](const at::Tensor& meta) -> at::Tensor {
    if (!meta.defined()) return meta;
    const size_t i = index++;
    const Spec spec(mesh,
                    placements.empty() ? replicated(mesh) : placements[std::min(i, placements.size() - 1)],
                    meta.sizes(), std::nullopt, meta.scalar_type());
    const auto options = first.impl().local().options().dtype(meta.scalar_type());
    // Nothing of a scalar is zero, as in PyTorch.
    if (spec.ndim() == 0) return at::detail::make_tensor<DTensorImpl>(at::zeros({}, options), spec);
    return make_dtensor(at::empty(spec.local_shape(), options), spec);
  };
  for (const size_t i : c10::irange(results.size())) {
    IValue& value = results[i];
    const int64_t returned = info.returned_argument[i];
    if (returned >= 0 && !value.isTensorList()) {
      value = all[static_cast<size_t>(returned)];
    } else if (value.isTensor()) {
      value = without_elements(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = without_elements(tensor);
      value = std::move(tensors);
    }
  }
  arguments.replace_by(std::move(results));
}

}  // namespace tessera
