#pragma once

#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/dispatch/operator_info.h>
#include <tessera/placement/spec.h>

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

/// Views of distributed tensors: where they begin, what they are of, and how writes pass between view and
/// base where their local tensors do not share memory.
namespace tessera {

/// Where each view begins in the memory of the global tensor, counted from where the base begins: as on one
/// device, where a call that this refuses is refused too. `position`: of the base among the arguments, where
/// anything may be.
std::vector<int64_t> view_offsets(const c10::OperatorHandle& op, Stack arguments, size_t position,
                                  const Spec& base);

/// The storage offset of as_strided counts from where the storage of the base begins. A view has no memory
/// of its base but its own elements: makes it count from where 'self' does.
void offset_from_self(const OperatorInfo& as_strided, Arguments& arguments);

/// Remembers what a view is of, if writing into it does not write into its base. `index`: among the results
/// of the operator. `arguments`: with which it is made again, if it does not share the memory of the base.
void set_origin(const at::Tensor& view, size_t index, const DistributedArgument& base, const OpPlan& plan,
                const c10::OperatorHandle& op, const Stack& arguments);

/// The tensor with the shape and the memory it has now, whatever becomes of it in place.
at::Tensor as_it_was(const at::Tensor& tensor);

}  // namespace tessera
