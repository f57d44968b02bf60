#pragma once

#include <c10/core/DispatchKey.h>

/// The dispatch keys that Tessera borrows from libtorch, and why each is safe. libtorch has no way to add a
/// key; all of these are ones that it names but does not use itself.
namespace tessera {

/// Of DTensors. A backend for use outside libtorch: no device has it (only PrivateUse1 can be one), and it
/// stands above all backends but Meta, so that operators on DTensors and plain tensors reach us. Its autograd
/// and ADInplaceOrView come with it and stand above, as those of any backend.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::PrivateUse3;
inline constexpr c10::DispatchKey kDTensorAutogradKey = c10::DispatchKey::AutogradPrivateUse3;

/// Where libtorch keeps autograd's formula of an operator that is composed of others for other tensors. No
/// tensor of ours has this key: it is only named to redispatch to, from a kernel at kDTensorAutogradKey, so
/// that nested tensors are not affected.
inline constexpr c10::DispatchKey kAutogradFormulaKey = c10::DispatchKey::AutogradNestedTensor;

/// Of sharded tensors. Above autograd, autocast and the composition of operators, so that a registered
/// implementation of `linear` sees `linear`. Reserved for torchdistx, which is no longer developed: nothing
/// in libtorch registers a kernel for it or makes a tensor with it.
inline constexpr c10::DispatchKey kShardedTensorKey = c10::DispatchKey::DeferredInit;

/// Of DTensors with an attachment (see DTensorImpl), which tessera/nn uses for hooks around the operators
/// that use a weight. Above autograd, autocast and the composition of operators. Reserved for libtorch's own
/// unit tests: libtorch registers no kernel for it and makes no tensor with it. All operators that have no
/// hooks fall through.
/// A thread has it too while it makes a model on meta (OnMeta, tessera/nn): then factories of plain tensors reach us,
/// which no tensor among their arguments would bring there.
inline constexpr c10::DispatchKey kHooksKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// Of DTensors that are parameters of a unit of fully_shard: operators get the gathered parameter instead. Above
/// kHooksKey, so that a gathered weight has its hooks. As reserved and as unused as that one.
inline constexpr c10::DispatchKey kUnitKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

}  // namespace tessera
