#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/attachment.h>
#include <tessera/nn/hooks.h>
#include <tessera/nn/seams.h>

#include <algorithm>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/irange.h>
#include <torch/library.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace tessera {

namespace {

using torch::jit::Stack;

/// Null if it has none. Nobody else attaches something to a DTensor.
std::shared_ptr<const WeightHooks> hooks_of(const at::Tensor& tensor) {
  const DTensorImpl* impl = tensor.defined() ? DTensorImpl::of(tensor) : nullptr;
  return impl ? std::static_pointer_cast<const WeightHooks>(impl->attachment()) : nullptr;
}

/// Those for this use of it; null if there are none.
std::shared_ptr<const ModuleHooks> hooks_for(const at::Tensor& tensor, WeightUse use) {
  const auto hooks = hooks_of(tensor);
  if (!hooks) return nullptr;
  const auto found = hooks->uses.find(use);
  return found == hooks->uses.end() ? nullptr : std::shared_ptr<const ModuleHooks>(hooks, &found->second);
}

/// Calls the hooks of the weight around the operator.
class Around final : public c10::OperatorKernel {
 public:
  explicit Around(Seam seam) : seam_(seam) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard no_more(kHooksKey);
    const size_t first = stack->size() - op.schema().arguments().size();
    const c10::IValue& weight = (*stack)[first + seam_.weight];
    const auto hooks = weight.isTensor() ? hooks_for(weight.toTensor(), seam_.use) : nullptr;
    if (!hooks) return op.callBoxed(*stack);
    std::vector<c10::IValue*> inputs{&(*stack)[first + seam_.input]};
    for (const size_t other : seam_.other_inputs) {
      if (other != 0 && (*stack)[first + other].isTensor()) inputs.push_back(&(*stack)[first + other]);
    }
    run(hooks->inputs, inputs);
    op.callBoxed(*stack);
    run(hooks->outputs, {&(*stack)[stack->size() - op.schema().returns().size()]});
  }

 private:
  static void run(const std::vector<TensorsHook>& hooks, const std::vector<c10::IValue*>& values) {
    if (hooks.empty()) return;
    std::vector<at::Tensor> tensors;
    for (c10::IValue* value : values) tensors.push_back(std::move(*value).toTensor());
    for (const TensorsHook& hook : hooks) hook(tensors);
    for (const size_t i : c10::irange(values.size())) *values[i] = std::move(tensors.at(i));
  }

  const Seam seam_;
};

/// The transposed weight of a Linear is its weight still.
at::Tensor transposed(const at::Tensor& weight) {
  const c10::impl::ExcludeDispatchKeyGuard no_more(kHooksKey);
  at::Tensor result = weight.t();
  if (hooks_for(weight, WeightUse::linear)) DTensorImpl::of(result)->set_attachment(hooks_of(weight));
  return result;
}

/// A Linear adds its bias to what its operator gave, which a hook may have made a local tensor. Then the
/// hooks of the bias make a local tensor of it, given both.
at::Tensor& add_bias(at::Tensor& output, const at::Tensor& bias, const at::Scalar& alpha) {
  const c10::impl::ExcludeDispatchKeyGuard no_more(kHooksKey);
  const auto hooks = hooks_for(bias, WeightUse::linear);
  if (!hooks || DTensor::is_dtensor(output)) return output.add_(bias, alpha);
  std::vector<at::Tensor> tensors{bias, output};
  for (const TensorsHook& hook : hooks->inputs) hook(tensors);
  return output.add_(tensors.at(0), alpha);
}

class Registration {
 public:
  Registration() {
    auto& dispatcher = c10::Dispatcher::singleton();
    all_.fallback(torch::CppFunction::makeFallthrough());
    for (const Seam& seam : kSeams) {
      const std::string name = std::string("aten::") + seam.op;
      const size_t dot = name.find('.');
      handles_.push_back(dispatcher.registerImpl(
          {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)}, kHooksKey,
          c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Around>(seam)), std::nullopt, nullptr,
          "tessera"));
    }
    aten_.impl("t", transposed);
    aten_.impl("add_.Tensor", add_bias);
  }

 private:
  std::vector<c10::RegistrationHandleRAII> handles_;
  torch::Library all_{torch::Library::IMPL, "_", kHooksKey, __FILE__, __LINE__};
  torch::Library aten_{torch::Library::IMPL, "aten", kHooksKey, __FILE__, __LINE__};
};

/// Never undone: tensors in static variables may outlive any order of destruction. Used by nobody, but kept,
/// so that what looks for leaks finds it.
[[gnu::used]] Registration* const registration = new Registration;

/// The weight that the operator of a module is called with.
struct Weight {
  at::Tensor tensor;
  WeightUse use;
};

template <class... M>
void find_weight(torch::nn::Module& module, WeightUse use, std::optional<Weight>& found) {
  auto look = [&](auto* known) {
    if (known) found = Weight{known->weight, use};
  };
  (look(dynamic_cast<M*>(&module)), ...);
}

std::optional<Weight> weight_of(torch::nn::Module& module) {
  using namespace torch::nn;
  std::optional<Weight> found;
  find_weight<LinearImpl>(module, WeightUse::linear, found);
  find_weight<EmbeddingImpl, EmbeddingBagImpl>(module, WeightUse::embedding, found);
  find_weight<Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl,
              ConvTranspose3dImpl>(module, WeightUse::convolution, found);
  find_weight<LayerNormImpl, GroupNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
              InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl>(module, WeightUse::normalization,
                                                                          found);
  find_weight<PReLUImpl, BilinearImpl>(module, WeightUse::other, found);
  return found;
}

void append(ModuleHooks& hooks, TensorsHook inputs, TensorsHook outputs) {
  if (inputs) hooks.inputs.push_back(std::move(inputs));
  if (outputs) hooks.outputs.push_back(std::move(outputs));
}

}  // namespace

void add_hooks(torch::nn::Module& module, TensorsHook inputs, TensorsHook outputs) {
  const auto weight = weight_of(module);
  if (weight && DTensor::is_dtensor(weight->tensor)) {
    const auto known = hooks_of(weight->tensor);
    auto hooks = known ? std::make_shared<WeightHooks>(*known) : std::make_shared<WeightHooks>();
    append(hooks->uses[weight->use], std::move(inputs), std::move(outputs));
    DTensorImpl::of(weight->tensor)->set_attachment(std::move(hooks));
  } else {
    append(attachment(module).hooks, std::move(inputs), std::move(outputs));
  }
}

void add_scope(torch::nn::Module& module, ScopeHook scope) {
  attachment(module).hooks.scopes.push_back(std::move(scope));
}

const ModuleHooks* hooks_of_calls(const torch::nn::Module& module) {
  const Attachment* known = find_attachment(module);
  return known ? &known->hooks : nullptr;
}

}  // namespace tessera
