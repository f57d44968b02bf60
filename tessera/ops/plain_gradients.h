#pragma once

#include <initializer_list>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

/// Operators for which autograd has a formula that makes a gradient of zeros as a plain tensor. It becomes a
/// distributed one here, so that it can be added to others, and leaves have no other. Each family of operators
/// registers its own.
namespace tessera {

/// The tensor itself; if it needs a gradient, that will be a distributed one.
at::Tensor with_distributed_gradient(const at::Tensor& tensor);

/// Calls the operator, from a kernel of ours above autograd, with the formula that autograd has for it.
void call_autograd_formula(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// Registers a kernel above autograd for these operators, by which the gradients of all their inputs are distributed.
void distribute_gradients(torch::Library& library, std::initializer_list<const char*> names);

}  // namespace tessera
