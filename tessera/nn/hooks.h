#pragma once

#include <tessera/export.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

/// C++ modules have no hooks around `forward`, but what a module of libtorch does is one operator with its
/// weight: so hooks of a Linear, Embedding, convolution or normalisation are kept by its weight, which must
/// be distributed, and called around that operator, however the module is called. Hooks of all other modules
/// are kept by the module, and called where it is called by `tessera::call`.
namespace tessera {

/// Changes the tensors that a module was called with, or those that it returns.
using TensorsHook = std::function<void(std::vector<at::Tensor>&)>;

/// Makes something that lives while a module computes.
using ScopeHook = std::function<std::shared_ptr<void>()>;

struct ModuleHooks {
  std::vector<TensorsHook> inputs, outputs;  // called in this order
  std::vector<ScopeHook> scopes;             // around both, the first one outermost
};

/// Adds hooks, either of which may be null, to those that the module has.
TESSERA_API void add_hooks(torch::nn::Module& module, TensorsHook inputs, TensorsHook outputs);

/// Adds a scope around what `call` does with the module.
TESSERA_API void add_scope(torch::nn::Module& module, ScopeHook scope);

/// The hooks that `call` calls, or null if it has none to call.
TESSERA_API const ModuleHooks* hooks_of_calls(const torch::nn::Module& module);

/// The kinds of operators that hooks may be around. A weight may be that of several: tied embeddings.
enum class WeightUse : uint8_t { linear, embedding, convolution, normalization, other };

struct WeightHooks {
  std::map<WeightUse, ModuleHooks> uses;
};

namespace detail {

/// Scopes that end in the reverse order.
class Scopes {
 public:
  explicit Scopes(const std::vector<ScopeHook>& hooks) {
    for (const ScopeHook& hook : hooks) entered_.push_back(hook());
  }
  ~Scopes() {
    while (!entered_.empty()) entered_.pop_back();
  }
  Scopes(const Scopes&) = delete;
  Scopes& operator=(const Scopes&) = delete;

 private:
  std::vector<std::shared_ptr<void>> entered_;
};

/// Runs `hooks` over those of `values` that are tensors.
template <class... Values>
void apply_hooks(const std::vector<TensorsHook>& hooks, Values&... values) {
  std::vector<at::Tensor> tensors;
  auto collect = [&](auto& value) {
    if constexpr (std::same_as<std::remove_cvref_t<decltype(value)>, at::Tensor>) tensors.push_back(value);
  };
  (collect(values), ...);
  for (const TensorsHook& hook : hooks) hook(tensors);
  size_t next = 0;
  auto put = [&](auto& value) {
    if constexpr (std::same_as<std::remove_cvref_t<decltype(value)>, at::Tensor>) value = tensors.at(next++);
  };
  (put(values), ...);
}

}  // namespace detail

/// `module->forward(arguments...)` with the hooks of the module around it: over the arguments that are
/// tensors, and over the tensor, or tuple of tensors, that it returns.
///   y = call(attention, x);      // instead of attention->forward(x)
template <class Holder, class... Arguments>
auto call(Holder&& module, Arguments&&... arguments) {
  const ModuleHooks* hooks = hooks_of_calls(*module);
  if (!hooks) return module->forward(std::forward<Arguments>(arguments)...);
  const detail::Scopes scopes(hooks->scopes);
  std::tuple<std::remove_cvref_t<Arguments>...> values(std::forward<Arguments>(arguments)...);
  std::apply([&](auto&... each) { detail::apply_hooks(hooks->inputs, each...); }, values);
  auto result = std::apply([&](auto&... each) { return module->forward(each...); }, values);
  if constexpr (requires { std::tuple_size<decltype(result)>::value; }) {
    std::apply([&](auto&... each) { detail::apply_hooks(hooks->outputs, each...); }, result);
  } else {
    detail::apply_hooks(hooks->outputs, result);
  }
  return result;
}

}  // namespace tessera
