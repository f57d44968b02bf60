#include <tessera/dispatch/operator_call.h>
#include <tessera/dispatch/operator_info.h>
#include <tessera/dispatch/register.h>
#include <tessera/dispatch/register_kernels.h>
#include <tessera/dispatch_keys.h>
#include <tessera/error.h>
#include <tessera/rules/rule.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace tessera {

namespace {

using torch::jit::Stack;

/// The one kernel that all operators on distributed tensors reach.
class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(const c10::OperatorHandle& op) : info_(op) {}
  void operator()(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, Stack* stack) {
    dispatch_operator(info_, *stack);
  }

 private:
  const OperatorInfo info_;
};

/// Of operators that are registered after us.
void late_kernel(const c10::OperatorHandle& op, Stack* stack) {
  static auto& mutex = *new std::mutex;
  static auto& infos = *new std::map<std::string, const OperatorInfo*>;  // which are never deleted
  const OperatorInfo* info = nullptr;
  {
    const std::lock_guard lock(mutex);
    auto& known = infos[c10::toString(op.operator_name())];
    if (!known || !(known->op == op)) known = new OperatorInfo(op);  // a library may define it again
    info = known;
  }
  dispatch_operator(*info, *stack);
}

bool has_out(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& a) { return a.is_out(); });
}

/// Whether libtorch's composition of other operators serves as it is. Not where the operator has a rule of its
/// own (then autograd has a formula of its own for it too), nor with out=, which is written through plain
/// tensors.
bool decomposes(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && !has_out(op) &&
         !rules::find_rule(c10::toString(op.operator_name()), false);
}

/// At load: a kernel for every operator that does not decompose by itself, and for all that other libraries
/// add later. (A fallback alone is not enough: libtorch's composite kernels would be preferred to it.)
class Registration {
 public:
  Registration() {
    auto& dispatcher = c10::Dispatcher::singleton();
    constexpr auto key = kDTensorKey;
    handles_.push_back(dispatcher.registerFallback(
        key, c10::KernelFunction::makeFromBoxedFunction<&late_kernel>(), "tessera"));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findOp(name);
      if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(key) || decomposes(*op)) continue;
      handles_.push_back(dispatcher.registerImpl(
          name, key, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op)), std::nullopt,
          nullptr, "tessera"));
    }
    // Operators of other libraries that say nothing of autograd: as libtorch does for the backends it knows.
    all_.fallback(torch::autograd::basicAutogradNotImplementedFallback());
  }

  /// Operators that were registered after us may have kernels that would be preferred to our fallback.
  void cover(const std::string& name) {
    const size_t dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchema(
        {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    TESSERA_CHECK_VALUE(op, "register_sharding: there is no operator \"", name,
                        "\"; expected a name as in \"aten::sum.dim_IntList\".");
    TESSERA_CHECK_VALUE(!decomposes(*op), "register_sharding: ", name,
                        " is composed of other operators; register rules for those.");
    const std::lock_guard lock(mutex_);
    if (op->hasKernelForDispatchKey(kDTensorKey)) return;
    handles_.push_back(c10::Dispatcher::singleton().registerImpl(
        op->operator_name(), kDTensorKey,
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op)), std::nullopt, nullptr,
        "tessera"));
  }

 private:
  std::mutex mutex_;
  std::vector<c10::RegistrationHandleRAII> handles_;
  torch::Library all_{torch::Library::IMPL, "_", kDTensorAutogradKey, __FILE__, __LINE__};
};

/// Never undone: tensors in static variables may outlive any order of destruction.
Registration& registration() {
  static Registration& instance = *new Registration;
  return instance;
}

}  // namespace

void register_kernels() { registration(); }

void register_sharding(const std::string& op, rules::Rule rule) {
  registration().cover(op);
  rules::add_rule({op}, std::move(rule));
}

}  // namespace tessera
