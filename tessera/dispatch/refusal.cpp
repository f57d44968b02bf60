#include <tessera/comm/collectives.h>
#include <tessera/comm/observer.h>
#include <tessera/comm/shared_error.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/refusal.h>
#include <tessera/error.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
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
      value = at::detail::createCPUGenerator();
    }
  }
  return arguments;
}

at::Tensor meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

/// Whether an error is about meta tensors themselves, of which some kernels ask for values or another device.
bool is_of_meta_tensors(std::string_view error) {
  error = error.substr(0, error.find('\n'));  // behind it: where it was raised
  return error.find("meta") != std::string_view::npos || error.find("Meta") != std::string_view::npos;
}

/// What stand-ins are, in place of dtypes that an operator may refuse: the same, those that all operators on
/// numbers take, those that all take that have indices beside them, and integers.
using Convert = at::ScalarType (*)(at::ScalarType);
at::ScalarType as_it_is(at::ScalarType dtype) { return dtype; }
at::ScalarType to_float(at::ScalarType /*dtype*/) { return at::kFloat; }
at::ScalarType to_float_or_index(at::ScalarType dtype) {
  return at::isIntegralType(dtype, /*includeBool=*/true) ? dtype : at::kFloat;
}
at::ScalarType to_integer(at::ScalarType /*dtype*/) { return at::kLong; }
constexpr Convert kOthers[] = {to_float, to_float_or_index, to_integer};

/// The arguments with tensors of one value.
using Make = std::function<Stack(int64_t value, Convert dtype)>;

/// Of one element each, or none.
Make of_one_element(const c10::OperatorHandle& op, const Stack& arguments) {
  return [&op, &arguments](int64_t value, Convert dtype) {
    return with_stand_ins(op, arguments, [&](const at::Tensor& tensor) {
      std::vector<int64_t> sizes = tensor.sizes().vec();
      for (int64_t& size : sizes) size = std::min<int64_t>(size, 1);
      return at::full(sizes, value, tensor.options().dtype(dtype(tensor.scalar_type())));
    });
  };
}

c10::DimVector first_shape(const Spec& spec) {
  return spec.local_shape(c10::DimVector(spec.mesh().ndim(), 0));
}

/// Of the local shapes of the first rank. Plain tensors, which have no dims, are as they are.
Make of_first_rank(const c10::OperatorHandle& op, const Stack& arguments, const std::vector<Spec>& inputs) {
  return [&](int64_t value, Convert dtype) {
    size_t next = 0;
    return with_stand_ins(op, arguments, [&](const at::Tensor& tensor) {
      const auto converted = dtype(tensor.scalar_type());
      if (!DTensorImpl::of(tensor)) return tensor.to(converted);
      return at::full(first_shape(inputs[next++]), value, tensor.options().dtype(converted));
    });
  };
}

/// The error with which the operator refuses these; null if it accepts them.
std::exception_ptr refusal(const c10::OperatorHandle& op, Stack arguments) {
  try {
    op.callBoxed(arguments);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

bool is_not_implemented(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::NotImplementedError&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// Whether the operator accepts the same arguments of other dtypes. Else it may be that they are too small.
bool accepts_others(const c10::OperatorHandle& op, const Make& make) {
  return std::any_of(std::begin(kOthers), std::end(kOthers),
                     [&](Convert dtype) { return !refusal(op, make(0, dtype)); });
}

/// Throws what the operator refuses for its dtypes: neither for the values, nor for shapes.
void throw_refusal(const c10::OperatorHandle& op, const Make& make) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const std::exception_ptr error = refusal(op, make(0, as_it_is));
  if (error && refusal(op, make(1, as_it_is)) && (is_not_implemented(error) || accepts_others(op, make)))
    std::rethrow_exception(error);
}

/// How many elements the rank holds that holds the fewest. Strided shards are not short at the last rank only.
int64_t smallest_share(const Spec& spec) {
  const auto mesh_shape = spec.mesh().shape();
  c10::DimVector coordinate(mesh_shape.size(), 0);
  int64_t smallest = spec.numel();
  while (true) {
    smallest = std::min(smallest, c10::multiply_integers(spec.local_shape(coordinate)));
    size_t m = 0;
    for (; m < coordinate.size(); ++m) {
      if (spec.placement(m).is_shard_like() && ++coordinate[m] < mesh_shape[m]) break;
      coordinate[m] = 0;
    }
    if (smallest == 0 || m == coordinate.size()) return smallest;
  }
}

}  // namespace

bool may_refuse_shapes(const c10::OperatorHandle& op, const Stack& arguments) {
  // Its kernel for meta tensors refuses dtypes that others take; its rule looks at the shapes.
  if (op.schema().name() == "aten::_grouped_mm") return false;
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
  const Make make = of_one_element(op, arguments);
  const std::exception_ptr error = refusal(op, make(0, as_it_is));
  return error && (is_not_implemented(error) || accepts_others(op, make));
}

void check_dtypes(const c10::OperatorHandle& op, const Stack& arguments) {
  throw_refusal(op, of_one_element(op, arguments));
}

bool holds_nothing_somewhere(const std::vector<Spec>& inputs) {
  return std::any_of(inputs.begin(), inputs.end(), [](const Spec& spec) {
    return spec.numel() > 0 && spec.is_sharded() && smallest_share(spec) == 0;
  });
}

bool may_refuse_dtypes_elsewhere(const std::vector<Spec>& inputs) {
  const auto is_always_taken = [&](const Spec& spec) {
    return spec.dtype() == inputs[0].dtype() && (spec.dtype() == at::kFloat || spec.dtype() == at::kDouble);
  };
  const bool holds_nothing = std::any_of(inputs.begin(), inputs.end(), [](const Spec& spec) {
    return spec.numel() > 0 && c10::multiply_integers(spec.local_shape()) == 0;
  });
  return holds_nothing && !std::all_of(inputs.begin(), inputs.end(), is_always_taken);
}

void check_dtypes_as_first_rank(const c10::OperatorHandle& op, const Stack& arguments,
                                const std::vector<Spec>& inputs) {
  throw_refusal(op, of_first_rank(op, arguments, inputs));
}

void compute_or_refuse_together(const std::string& op, const DeviceMesh& mesh,
                                const std::function<void()>& compute) {
  std::exception_ptr error;
  try {
    compute();
  } catch (...) {
    error = std::current_exception();
  }
  const auto mine = error ? comm::kind_of(error) : comm::ErrorKind::none;
  const at::Tensor kind = at::full({1}, static_cast<int64_t>(mine), at::kLong);
  const comm::WhileAgreeing agreeing;
  comm::all_reduce(kind, c10d::ReduceOp::MAX, mesh.get_joint_group()).wait();
  if (error) std::rethrow_exception(error);
  const auto found = static_cast<comm::ErrorKind>(kind.item<int64_t>());
  if (found != comm::ErrorKind::none)
    comm::throw_error(found, op + ": another rank refuses its local values.");
}

}  // namespace tessera
