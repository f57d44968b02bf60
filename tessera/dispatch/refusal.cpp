#include <tessera/dispatch/refusal.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

using c10::IValue;
using torch::jit::Stack;
using StandIn = std::function<at::Tensor(const at::Tensor&)>;

/// What stand-ins are warned of does not concern the user.
class Quiet final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

/// The arguments with another tensor for each, and a generator that nobody else draws from. `device`: in
/// place of those among them.
Stack with_stand_ins(const c10::OperatorHandle& op, Stack arguments, const StandIn& stand_in,
                     std::optional<at::Device> device = std::nullopt) {
  auto replaced = [&](const at::Tensor& tensor) { return tensor.defined() ? stand_in(tensor) : tensor; };
  for (const size_t i : c10::irange(arguments.size())) {
    IValue& value = arguments[i];
    if (value.isTensor()) {
      value = replaced(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      std::transform(tensors.begin(), tensors.end(), tensors.begin(), replaced);
      value = std::move(tensors);
    } else if (value.isList() && std::any_of(value.toListRef().begin(), value.toListRef().end(),
                                             [](const IValue& item) { return item.isTensor(); })) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const IValue& item : value.toListRef())
        tensors.push_back(item.isTensor() ? std::optional(replaced(item.toTensor())) : std::nullopt);
      value = std::move(tensors);
    } else if (value.isDevice() && device) {
      value = *device;
    } else if (op.schema().arguments()[i].name() == "generator") {
      value = IValue();  // meta tensors draw from none
    }
  }
  return arguments;
}

at::Tensor meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

/// The arguments with zeros of one element, of `dtype` or of their own.
Stack of_one_element(const c10::OperatorHandle& op, const Stack& arguments,
                     std::optional<at::ScalarType> dtype = std::nullopt) {
  return with_stand_ins(op, arguments, [dtype](const at::Tensor& tensor) {
    std::vector<int64_t> sizes = tensor.sizes().vec();
    for (int64_t& size : sizes) size = std::min<int64_t>(size, 1);
    return at::zeros(sizes, dtype ? tensor.options().dtype(*dtype) : tensor.options());
  });
}

/// Whether an error is about meta tensors themselves, of which some kernels ask for values or another device.
bool is_of_meta_tensors(std::string_view error) {
  error = error.substr(0, error.find('\n'));  // behind it: where it was raised
  return error.find("meta") != std::string_view::npos || error.find("Meta") != std::string_view::npos;
}

enum class Answer { accepts, refuses, not_implemented };

Answer ask(const c10::OperatorHandle& op, Stack arguments) {
  try {
    op.callBoxed(arguments);
    return Answer::accepts;
  } catch (const c10::NotImplementedError&) {
    return Answer::not_implemented;
  } catch (const std::exception&) {
    return Answer::refuses;
  }
}

}  // namespace

bool may_refuse_shapes(const c10::OperatorHandle& op, const Stack& arguments) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  try {
    Stack stack = with_stand_ins(op, arguments, meta, at::kMeta);
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  } catch (const c10::Error& error) {
    return !is_of_meta_tensors(error.what_without_backtrace());
  } catch (const std::exception& error) {  // of a kernel that is written in Python
    return !is_of_meta_tensors(error.what());
  }
  return false;
}

bool may_refuse_dtypes(const c10::OperatorHandle& op, const Stack& arguments) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const Answer answer = ask(op, of_one_element(op, arguments));
  if (answer != Answer::refuses) return answer == Answer::not_implemented;
  // It may be that one element is too small, whatever the dtype.
  return ask(op, of_one_element(op, arguments, at::kFloat)) == Answer::accepts ||
         ask(op, of_one_element(op, arguments, at::kLong)) == Answer::accepts;
}

}  // namespace tessera
