#pragma once

#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

/// Operators that libtorch composes of others decompose by themselves, except for some: libtorch's composition makes
/// plain tensors, or reads the memory of its arguments. Each family of operators registers its own, twice: in inference
/// mode there is no autograd above us. Those of no family are in composites.cpp.
namespace tessera {

/// The composition of libtorch, in which the plain tensors that it makes are the same on all ranks. Those
/// that the caller gives are not taken to be.
void compose(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Registers it for these operators.
void register_composed(torch::Library& library, std::initializer_list<const char*> names);

/// A plain tensor that is the same on all ranks, as a distributed one.
at::Tensor replicated_tensor(const at::Tensor& plain, const DeviceMesh& mesh);

/// The global values of a tensor, distributed or not, as a plain one.
at::Tensor full_of(const at::Tensor& tensor);
/// The same, of a tensor of integers.
std::vector<int64_t> integers_of(const at::Tensor& tensor);

}  // namespace tessera
