#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

/// The composition of libtorch, in which the plain tensors that it makes are the same on all ranks. Those
/// that the caller gives are not taken to be.
void compose(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera
