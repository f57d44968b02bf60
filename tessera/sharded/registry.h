#pragma once

#include <tessera/export.h>
#include <tessera/sharded/sharded_tensor.h>

#include <functional>
#include <string>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/infer_schema.h>
#include <ATen/core/stack.h>

/// Operators on sharded tensors. A call with a sharded tensor anywhere among its arguments goes to the first
/// of these that there is: what a user registered for the operator; what a user registered for the operator
/// and the class of the tensor's spec; the built-in implementation (docs/sharded.md lists them); for
/// pointwise operators of libtorch `on_local_shards`; an error that names the operator and says what to do.
///
/// An implementation is a function with the operator's own signature. It is called before autograd and before
/// composite operators decompose, so it may be one of `aten::linear`, and gradients flow through what it does
/// with the local shards.
///
///   custom_sharded_op("aten::linear", [](const at::Tensor& input, const at::Tensor& weight,
///                                        const std::optional<at::Tensor>& bias) {
///     const ShardedTensor sharded(weight);
///     ...
///   });
namespace tessera::sharded {

/// An implementation that takes its arguments from a stack and leaves its results there.
using BoxedOp = std::function<void(const c10::OperatorHandle& op, torch::jit::Stack* stack)>;

namespace detail {

enum class Table { custom, spec, builtin };
TESSERA_API void register_op(Table table, std::type_index spec, const std::string& op, BoxedOp implementation,
                             const c10::FunctionSchema* inferred);

/// Registers a BoxedOp, or a function with the operator's signature, which is checked.
template <class Function>
void add(Table table, std::type_index spec, const std::string& op, Function function) {
  if constexpr (std::is_convertible_v<Function, BoxedOp>) {
    register_op(table, spec, op, std::move(function), nullptr);
  } else {
    using Type = typename c10::guts::infer_function_traits_t<Function>::func_type;
    const c10::FunctionSchema inferred = c10::inferFunctionSchemaFlattenedReturns<Type>();
    c10::KernelFunction kernel;
    if constexpr (std::is_pointer_v<Function>) {
      kernel = c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
    } else {
      kernel = c10::KernelFunction::makeFromUnboxedLambda(std::move(function));
    }
    register_op(
        table, spec, op,
        [kernel = std::move(kernel)](const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
          kernel.callBoxed(handle, c10::DispatchKeySet(), stack);
        },
        &inferred);
  }
}

}  // namespace detail

/// Adds or replaces the user's implementation of an operator, named as in "aten::linear" or
/// "aten::add.Tensor". For calls from now on, on all threads; all ranks must do so alike. Throws if there is
/// no such operator, or the signature is not its own.
template <class Function>
void custom_sharded_op(const std::string& op, Function function) {
  detail::add(detail::Table::custom, typeid(void), op, std::move(function));
}

/// The same for tensors whose spec is of class `Spec`.
template <class Spec, class Function>
void custom_sharding_spec_op(const std::string& op, Function function) {
  static_assert(std::is_base_of_v<ShardingSpec, Spec>);
  detail::add(detail::Table::spec, typeid(Spec), op, std::move(function));
}

/// Adds a built-in implementation: what is used where users have registered none.
template <class Function>
void sharded_op_impl(const std::string& op, Function function) {
  detail::add(detail::Table::builtin, typeid(void), op, std::move(function));
}

/// The names of all operators that work on sharded tensors with a spec of the built-in classes, in order.
TESSERA_API std::vector<std::string> sharded_ops();

/// The same operator on each local shard: a tensor of the same tiling, or the argument that it writes into.
/// For operators that compute each element from those at the same index of sharded tensors of one tiling, and
/// from plain tensors of one element:
///   custom_sharded_op("mine::squash", on_local_shards);
/// Those of libtorch that it says to be pointwise work so without being registered.
TESSERA_API void on_local_shards(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::sharded
