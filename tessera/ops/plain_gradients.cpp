#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch_keys.h>
#include <tessera/dtensor/dtensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_gather_sparse_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumprod.h>
#include <ATen/ops/cumprod_backward_native.h>
#include <ATen/ops/detach.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

/// Operators for which autograd has a formula that makes a gradient as a plain tensor. One of zeros becomes a
/// distributed one here, so that it can be added to others, and leaves have no other.
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

at::Tensor with_distributed_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() && DTensor::is_dtensor(tensor)
             ? WithDistributedGradient::apply(tensor)
             : tensor;
}

/// With the formula that autograd has for it.
void by_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(keys.add(kAutogradFormulaKey), stack);
}

void operator_with_plain_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (at::GradMode::is_enabled()) {
    const auto& arguments = op.schema().arguments();
    for (const size_t i : c10::irange(arguments.size())) {
      IValue& value = (*stack)[stack->size() - arguments.size() + i];
      const bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      if (value.isTensor() && !is_written) value = with_distributed_gradient(value.toTensor());
    }
  }
  by_autograd(op, keys, stack);
}

/// A gradient that is to have one itself, of products with zeros among them, is written into plain zeros by
/// libtorch. Here element k of the input gets the sum of what it is a factor of, but for itself.
at::Tensor cumprod_backward(const at::Tensor& gradient, const at::Tensor& input, int64_t dim,
                            const at::Tensor& output) {
  if (!at::GradMode::is_enabled() || input.dim() == 0 || input.numel() == 0)
    return at::native::cumprod_backward(gradient, input, dim, output);
  const at::Tensor factors = input.conj();
  std::vector<at::Tensor> gradients;
  for (const int64_t k : c10::irange(input.size(dim))) {
    const at::Tensor before = at::prod(factors.slice(dim, 0, k), dim, /*keepdim=*/true);
    const at::Tensor behind = at::cumprod(factors.slice(dim, k + 1), dim);
    const at::Tensor others = at::cat({before, before * behind}, dim);
    gradients.push_back((gradient.slice(dim, k) * others).sum(dim));
  }
  return at::stack(gradients, dim);
}

/// Without dims and elements, tensors are left out of what is joined.
bool is_left_out(const at::Tensor& tensor) {
  return tensor.dim() == 1 && tensor.size(0) == 0 && tensor.requires_grad();
}

void cat(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  IValue& list = (*stack)[stack->size() - 2];
  const at::List<at::Tensor> given = list.toTensorList();
  if (at::GradMode::is_enabled() && std::any_of(given.begin(), given.end(), is_left_out)) {
    std::vector<at::Tensor> tensors = given.vec();
    for (at::Tensor& tensor : tensors) {
      if (is_left_out(tensor)) tensor = with_distributed_gradient(tensor);
    }
    list = std::move(tensors);
  }
  by_autograd(op, keys, stack);
}

/// The gradient of what is repeated no times is zeros.
void repeat(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const IValue& repeats = stack->back();
  IValue& self = (*stack)[stack->size() - 2];
  const auto sizes = repeats.toListRef();
  const bool is_none = std::any_of(sizes.begin(), sizes.end(),
                                   [](const IValue& size) { return size.isInt() && size.toInt() == 0; });
  if (at::GradMode::is_enabled() && is_none) self = with_distributed_gradient(self.toTensor());
  by_autograd(op, keys, stack);
}

/// libtorch makes the zeros that this begins with as a plain tensor.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, int64_t dim, const at::Tensor& indices,
                                              c10::SymIntArrayRef sizes, bool keepdim) {
  const bool is_reduced = !keepdim && !sizes.empty();
  const at::Tensor zeros = grad.new_zeros_symint(sizes);
  return is_reduced ? zeros.scatter(dim, indices.unsqueeze(dim), grad.unsqueeze(dim))
                    : zeros.scatter(dim, indices, grad);
}

/// libtorch makes these zeros as a plain tensor too.
at::Tensor cummaxmin_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& indices,
                              int64_t dim) {
  return input.numel() == 0 ? input : input.new_zeros(input.sizes()).scatter_add(dim, indices, grad);
}

/// libtorch adds to zeros in place, which are replicated and would have to stay so.
at::Tensor index_select_backward(const at::Tensor& grad, c10::SymIntArrayRef sizes, int64_t dim,
                                 const at::Tensor& index) {
  return grad.new_zeros_symint(sizes).index_add(dim, index, grad);
}

/// libtorch adds to replicated zeros in place here too.
at::Tensor gather_backward(const at::Tensor& grad, const at::Tensor& self, int64_t dim,
                           const at::Tensor& index, bool sparse_grad) {
  if (sparse_grad) return at::_gather_sparse_backward(self, dim, index, grad);
  return grad.new_zeros_symint(self.sym_sizes()).scatter_add(dim, index, grad);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, library) {
  for (const char* name : {"_adaptive_avg_pool2d_backward",
                           "_adaptive_avg_pool3d_backward",
                           "_prelu_kernel_backward",
                           "adaptive_max_pool2d_backward",
                           "adaptive_max_pool3d_backward",
                           "avg_pool2d_backward",
                           "avg_pool3d_backward",
                           "copysign.Tensor",
                           "copysign_.Tensor",
                           "fractional_max_pool2d_backward",
                           "fractional_max_pool3d_backward",
                           "max_pool2d_with_indices_backward",
                           "max_pool3d_with_indices_backward",
                           "nextafter",
                           "nextafter_",
                           "normal.Tensor_Tensor",
                           "normal.Tensor_float",
                           "normal.float_Tensor",
                           "poisson",
                           "reflection_pad1d_backward",
                           "reflection_pad2d_backward",
                           "reflection_pad3d_backward",
                           "replication_pad1d_backward",
                           "replication_pad2d_backward",
                           "replication_pad3d_backward",
                           "sgn"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&operator_with_plain_gradients>());
  }
  library.impl("cumprod_backward", cumprod_backward);
  library.impl("repeat", torch::CppFunction::makeFromBoxedFunction<&repeat>());
  library.impl("cat", torch::CppFunction::makeFromBoxedFunction<&cat>());
  library.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
  library.impl("cummaxmin_backward", cummaxmin_backward);
  library.impl("index_select_backward", index_select_backward);
  library.impl("gather_backward", gather_backward);
}

}  // namespace

}  // namespace tessera
