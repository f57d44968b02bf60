// Operators that take a parameter of a unit of fully_shard, and get it gathered.

#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/nn/seams.h>
#include <tessera/nn/shard_unit.h>
#include <tessera/nn/unit_schedule.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace tessera {

namespace {

using c10::IValue;
using torch::jit::Stack;

/// What an operator does with its arguments.
struct OperatorUse {
  explicit OperatorUse(const c10::OperatorHandle& op) {
    const std::string& name = op.operator_name().name;
    std::string_view base = name;
    base.remove_prefix(std::min(base.size(), base.find("::") + 2));
    reads_values =
        !base.ends_with("_like") && !base.starts_with("new_") && !base.starts_with("is_") &&
        std::find(std::begin(kWithoutValues), std::end(kWithoutValues), base) == std::end(kWithoutValues);
    uses_weight = base == "t" || std::any_of(kSeams.begin(), kSeams.end(), [&](const Seam& seam) {
                    const std::string_view op_name = seam.op;
                    return op_name.substr(0, op_name.find('.')) == base;
                  });
    for (const auto& argument : op.schema().arguments())
      written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
  }

  /// They look at a tensor, not at its values.
  static constexpr std::string_view kWithoutValues[] = {
      "detach",         "alias",       "data",          "set_data",
      "requires_grad_", "retain_grad", "retains_grad",  "output_nr",
      "_version",       "_fw_primal",  "_make_dual",    "_has_compatible_shallow_copy_type",
      "size",           "stride",      "record_stream", "sym_size",
      "sym_numel",      "sym_stride"};

  bool reads_values;
  bool uses_weight;
  std::vector<bool> written;  // by argument
};

const OperatorUse& use_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OperatorUse> known;
  const auto found = known.find(&op.schema());
  return found != known.end() ? found->second : known.emplace(&op.schema(), OperatorUse(op)).first->second;
}

/// The arguments of one call, in which parameters are replaced.
class UnitArguments {
 public:
  UnitArguments(const c10::OperatorHandle& op, Stack& stack)
      : use_(use_of(op)), arguments_(stack.data() + stack.size() - use_.written.size()) {}

  ~UnitArguments() {
    if (schedule_) schedule_->hold(false);
  }

  /// Whether parameters are left as they are.
  bool replace() {
    bool left = false;
    for (const size_t i : c10::irange(use_.written.size())) {
      IValue& value = arguments_[i];
      if (value.isTensor()) {
        at::Tensor tensor = value.toTensor();
        if (replace(tensor, use_.written[i], left)) value = std::move(tensor);
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors = value.toTensorVector();
        bool any = false;
        for (at::Tensor& tensor : tensors) any |= replace(tensor, use_.written[i], left);
        if (any) value = std::move(tensors);
      } else if (value.isList()) {
        left |= std::any_of(value.toListRef().begin(), value.toListRef().end(), [](const IValue& item) {
          return item.isTensor() && ShardUnit::of(item.toTensor()).first;
        });
      }
    }
    if (cast_to_) cast_inputs();
    return left;
  }

 private:
  bool replace(at::Tensor& tensor, bool written, bool& left) {
    if (!tensor.defined() || !tensor.key_set().has(kUnitKey)) return false;
    const auto [unit, index] = ShardUnit::of(tensor);
    if (!unit || written || !use_.reads_values || !unit->gives(use_.uses_weight)) {
      left = true;
      return false;
    }
    if (last_ && last_ != unit && !schedule_) {
      schedule_ = unit->schedule();
      schedule_->hold(true);
    }
    last_ = unit;
    tensor = unit->gathered(index);
    if (unit->casts_inputs()) cast_to_ = unit->options().mp_policy.param_dtype;
    return true;
  }

  /// C++ modules have nowhere else where their inputs could be cast.
  void cast_inputs() {
    for (const size_t i : c10::irange(use_.written.size())) {
      if (use_.written[i] || !arguments_[i].isTensor()) continue;
      const at::Tensor& tensor = arguments_[i].toTensor();
      if (tensor.defined() && at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != *cast_to_)
        arguments_[i] = tensor.to(*cast_to_);
    }
  }

  const OperatorUse& use_;
  IValue* const arguments_;
  std::shared_ptr<ShardUnit> last_;
  std::shared_ptr<UnitSchedule> schedule_;
  std::optional<at::ScalarType> cast_to_;
};

void with_gathered(const c10::OperatorHandle& op, Stack* stack) {
  UnitArguments arguments(op, *stack);
  std::optional<c10::impl::ExcludeDispatchKeyGuard> as_they_are;
  if (arguments.replace()) as_they_are.emplace(kUnitKey);
  op.callBoxed(*stack);
}

class UnitKernel {
 public:
  UnitKernel() { all_.fallback(torch::CppFunction::makeFromBoxedFunction<&with_gathered>()); }

 private:
  torch::Library all_{torch::Library::IMPL, "_", kUnitKey, __FILE__, __LINE__};
};

/// Never undone: tensors in static variables may outlive any order of destruction.
[[gnu::used]] UnitKernel* const unit_kernel = new UnitKernel;

}  // namespace

}  // namespace tessera
