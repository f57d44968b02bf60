#pragma once

#include <tessera/rules/strategy.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera::kernels {

using rules::self_tensor;
using rules::Stack;

/// What the operator itself gives, of local tensors or distributed ones.
Stack call_operator(const c10::OperatorHandle& op, Stack arguments);

/// The arguments of a call, by name, to read and to replace.
class NamedArguments {
 public:
  NamedArguments(const c10::OperatorHandle& op, Stack& values) : schema_(op.schema()), values_(values) {}

  /// Whether the operator has that argument and it was not left out.
  bool has(const char* name) const;
  c10::IValue& operator[](const char* name) const;
  /// Undefined if it was left out.
  at::Tensor tensor(const char* name) const;
  const c10::FunctionSchema& schema() const { return schema_; }

 private:
  const c10::FunctionSchema& schema_;
  Stack& values_;
};

}  // namespace tessera::kernels
