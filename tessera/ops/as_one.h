#pragma once

#include <tessera/dispatch_keys.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera {

/// Whether forward-mode AD carries a tangent along with it. Functions of ours have no formulas for these.
inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

/// From a kernel of ours above autograd: the operator as one, not composed of others, with the formula that
/// autograd has for it.
template <class Operator, class... Arguments>
auto as_one(c10::DispatchKeySet keys, const Arguments&... arguments) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(Operator::name, Operator::overload_name)
                             .template typed<typename Operator::schema>();
  return op.redispatch(keys.add(kAutogradFormulaKey), arguments...);
}

}  // namespace tessera
