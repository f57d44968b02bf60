#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

/// What one device refuses, every rank has to refuse. An operator itself does so. What a rule computes in its
/// place, or what a rank computes of no elements, may accept more than the operator does.
namespace tessera {

/// Whether the operator itself may refuse these arguments, the distributed tensors among them, on one device.
/// Asks the operator about stand-ins, so that all ranks get the same answer and nothing is communicated or
/// drawn. True is only a doubt: on replicas the operator says itself whether it refuses them, and why.

/// For their shapes, or the values of what is no tensor: asked of meta tensors of the global shapes. An
/// operator that has no meta kernel gives no cause for doubt.
bool may_refuse_shapes(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

/// For their dtypes, at which most kernels look only when they compute: asked of tensors of one element. Only
/// for operators whose rule says that they can be.
bool may_refuse_dtypes(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

}  // namespace tessera
