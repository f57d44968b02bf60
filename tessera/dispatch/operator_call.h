#pragma once

#include <tessera/dispatch/operator_info.h>

#include <ATen/core/stack.h>

namespace tessera {

/// Calls an operator on arguments among which are distributed tensors, and puts its results in their place:
/// one pass over the arguments finds the distributed ones and forms the key of the call; its plan comes from
/// a cache, or is made from the operator's rule; then the operator runs on local tensors, and its results are
/// wrapped.
void dispatch_operator(const OperatorInfo& info, torch::jit::Stack& stack);

}  // namespace tessera
