#pragma once

#include <tessera/placement/spec.h>

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

/// What one device refuses, every rank has to refuse. An operator itself does so. What a rule computes in its
/// place, or what a rank computes of no elements, may accept more than the operator does.
namespace tessera {

/// Whether the operator itself may refuse these arguments, the distributed tensors among them, on one device.
/// Asks the operator about stand-ins, so that all ranks get the same answer and nothing is communicated or
/// drawn. True is only a doubt: the replicated fallback shows whether it refuses them, and why.

/// For their shapes, or the values of what is no tensor: asked of meta tensors of the global shapes. An
/// operator that has no meta kernel gives no cause for doubt.
bool may_refuse_shapes(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

/// For their dtypes, at which most kernels look only when they compute: asked of tensors of one element. Only
/// for operators whose rule says that they can be.
bool may_refuse_dtypes(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

/// Throws the error with which the operator refuses these dtypes on one device, if it surely does. Asked of
/// the same stand-ins.
void check_dtypes(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

/// Kernels look at dtypes only when they compute something, so a rank that holds no elements accepts what its
/// peers refuse.

/// Whether some rank holds nothing of some input, of which others hold something.
bool holds_nothing_somewhere(const std::vector<Spec>& inputs);

/// Whether this rank does, and others may refuse the dtypes of all.
bool may_refuse_dtypes_elsewhere(const std::vector<Spec>& inputs);

/// Throws the error with which the first rank, which always holds something, refuses the dtypes of its
/// inputs, if it does. Asked of tensors of its local shapes. `arguments`: with the distributed tensors, of
/// which `inputs` says how each is placed for the operator.
void check_dtypes_as_first_rank(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                const std::vector<Spec>& inputs);

/// Computes something, which may throw on some ranks. Then the others throw an error of the same kind.
/// Collective.
void compute_or_refuse_together(const std::string& op, const DeviceMesh& mesh,
                                const std::function<void()>& compute);

}  // namespace tessera
