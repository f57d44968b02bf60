#pragma once

#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/dispatch/operator_info.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>

/// One call of an operator up to the point where it would run: no process group, no communication.
namespace tessera::testing {

/// What is known of an operator, "aten::add.Tensor".
inline const OperatorInfo& info_of(const std::string& op) {
  static std::map<std::string, OperatorInfo> known;
  const size_t dot = op.find('.');
  const std::string overload = dot == std::string::npos ? "" : op.substr(dot + 1);
  return known
      .try_emplace(
          op, c10::Dispatcher::singleton().findSchemaOrThrow(op.substr(0, dot).c_str(), overload.c_str()))
      .first->second;
}

/// A DTensor of zeros, as this rank sees it.
inline at::Tensor tensor_of(const Spec& spec) {
  const at::Tensor local = at::zeros(spec.local_shape(), spec.dtype());
  return make_dtensor(local, spec);
}

struct PreparedCall {
  /// Arguments that are left out at the end are None.
  PreparedCall(const std::string& op, Stack given) : info(info_of(op)), stack(std::move(given)) {
    arguments.collect();
  }
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;

  OpPlan plan() const {
    const Stack all = arguments.with_tensors();
    return make_op_plan(info, info.resolved(), arguments.call(all), arguments.writes_plain());
  }

  const OperatorInfo& info;
  Stack stack;
  Arguments arguments{info, info.resolved(), completed()};

 private:
  Stack& completed() {
    stack.resize(info.schema.arguments().size());
    return stack;
  }
};

}  // namespace tessera::testing
