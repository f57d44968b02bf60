#pragma once

#include <tessera/export.h>

#include <functional>
#include <typeindex>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

/// A torch::nn module lists its parameters and buffers by name, and computes with members that are handles on
/// the same tensors. To replace a tensor by a distributed one, both have to be found. The members of
/// libtorch's own modules are known; those of others are registered once:
///
///   struct GPTImpl : torch::nn::Module {
///     GPTImpl() { positions = register_parameter("positions", torch::zeros({256, 64})); }
///     at::Tensor positions;
///   };
///   register_members<GPTImpl>(&GPTImpl::positions);
///
/// Modules whose parameters and buffers are all in submodules need nothing. A parameter's
/// member that was forgotten is an error when the parameter is distributed, never a stale tensor.
namespace tessera {

namespace detail {
using Handles = std::vector<at::Tensor*>;
using FindHandles = std::function<void(torch::nn::Module&, Handles&)>;
TESSERA_API void add_members(std::type_index type, FindHandles find);

inline void add_handles(at::Tensor& member, Handles& handles) { handles.push_back(&member); }
inline void add_handles(std::vector<at::Tensor>& members, Handles& handles) {
  for (at::Tensor& member : members) handles.push_back(&member);
}
}  // namespace detail

/// Registers which members of M (and of what derives from it) are handles on its parameters and buffers:
/// tensors, or vectors of tensors. For all threads; may be repeated.
template <class M, class... Members>
void register_members(Members... members) {
  detail::add_members(typeid(M), [members...](torch::nn::Module& module, detail::Handles& handles) {
    if (auto* known = dynamic_cast<M*>(&module)) (detail::add_handles(known->*members, handles), ...);
  });
}

}  // namespace tessera
