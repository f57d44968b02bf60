#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch_keys.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/ops/plain_gradients.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/detach.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera {

namespace {

using c10::IValue;
using torch::jit::Stack;

/// The tensor itself, whose gradient is distributed.
struct WithDistributedGradient : torch::autograd::Function<WithDistributedGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& self) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const DTensorImpl& impl = *DTensorImpl::of(self);
    // Keeps the mesh.
    const at::Tensor local = at::zeros({}, impl.local().options());
    const DeviceMesh& mesh = impl.spec().mesh();
    context->save_for_backward({DTensor::from_local(local, mesh, replicated(mesh))});
    return at::detach(self);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined() || DTensor::is_dtensor(gradient)) return {gradient};
    const DeviceMesh mesh = DTensor(context->get_saved_variables()[0]).device_mesh();
    const at::Tensor zeros = at::zeros(gradient.sizes(), gradient.options());
    return {DTensor::from_local(zeros, mesh, replicated(mesh))};
  }
};

void operator_with_plain_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (at::GradMode::is_enabled()) {
    const auto& arguments = op.schema().arguments();
    for (const size_t i : c10::irange(arguments.size())) {
      IValue& value = (*stack)[stack->size() - arguments.size() + i];
      const bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      if (value.isTensor() && !is_written) value = with_distributed_gradient(value.toTensor());
    }
  }
  call_autograd_formula(op, keys, stack);
}

}  // namespace

at::Tensor with_distributed_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() && DTensor::is_dtensor(tensor)
             ? WithDistributedGradient::apply(tensor)
             : tensor;
}

void call_autograd_formula(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(keys.add(kAutogradFormulaKey), stack);
}

void distribute_gradients(torch::Library& library, std::initializer_list<const char*> names) {
  for (const char* name : names)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&operator_with_plain_gradients>());
}

}  // namespace tessera
