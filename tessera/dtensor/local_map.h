#pragma once

#include <tessera/dtensor/dtensor.h>
#include <tessera/export.h>

#include <concepts>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

struct LocalMapOptions {
  /// How each result is placed; nothing for one that stays plain.
  std::vector<OptionalPlacements> out_placements;
  /// How each tensor among the arguments must be placed; nothing for a plain one. Another placement is an error,
  /// or redistributed if `redistribute_inputs`. Empty: any placement is taken.
  std::vector<OptionalPlacements> in_placements = {};
  /// How the gradients of the local tensors are placed. Nothing, or empty: as the tensors, with P as R.
  std::vector<OptionalPlacements> in_grad_placements = {};
  /// Of the results; by default that of the first distributed argument.
  std::optional<DeviceMesh> device_mesh = {};
  bool redistribute_inputs = false;
};

namespace detail {

/// One call of a mapped function: arguments, then results, in order.
class TESSERA_API LocalMapCall {
 public:
  LocalMapCall(const LocalMapOptions& options, size_t tensors);
  /// A distributed tensor as this rank's local tensor, and any other as it is.
  at::Tensor argument(const at::Tensor& tensor);
  /// As distributed as the options say, unless no argument was.
  at::Tensor result(const at::Tensor& tensor);
  /// After the last one of so many.
  void check_results(size_t count) const;

 private:
  const LocalMapOptions& options_;
  std::optional<DeviceMesh> mesh_;
  size_t arguments_ = 0, results_ = 0;
};

template <class T>
inline constexpr bool is_tensor = std::derived_from<std::remove_cvref_t<T>, at::Tensor>;

}  // namespace detail

/// `function`, written for what one rank has, as a function of distributed tensors: each distributed argument is
/// replaced by this rank's local tensor, and each tensor in the result (a tensor, a tuple with some, or a vector
/// of them) becomes distributed again, of local tensors that are as large on every rank. Arguments and results that
/// are no tensors are passed on. Without a distributed argument it is the function itself.
///
///   auto product = local_map([](const at::Tensor& x, const at::Tensor& y) { return x.mm(y); },
///                            {.out_placements = {{{Partial()}}}, .in_placements = {{{Shard(1)}}, {{Shard(0)}}}});
///   at::Tensor z = product(x, y);
template <class Function>
auto local_map(Function function, LocalMapOptions options) {
  return [function = std::move(function),
          options = std::move(options)]<class... Arguments>(Arguments&&... arguments) {
    detail::LocalMapCall call(options, (0 + ... + (detail::is_tensor<Arguments> ? 1 : 0)));
    const auto local = [&](auto&& argument) -> decltype(auto) {
      if constexpr (detail::is_tensor<decltype(argument)>)
        return call.argument(argument);
      else
        return std::forward<decltype(argument)>(argument);
    };
    // Braces: arguments are taken in order.
    std::tuple<decltype(local(std::forward<Arguments>(arguments)))...> values{
        local(std::forward<Arguments>(arguments))...};
    auto result = std::apply(function, std::move(values));
    size_t count = 0;
    const auto distribute = [&](auto& value) {
      if constexpr (detail::is_tensor<decltype(value)>) {
        value = call.result(value);
        ++count;
      }
    };
    if constexpr (detail::is_tensor<decltype(result)>)
      distribute(result);
    else if constexpr (requires { std::tuple_size<decltype(result)>::value; })
      std::apply([&](auto&... each) { (distribute(each), ...); }, result);
    else
      for (at::Tensor& each : result) distribute(each);
    call.check_results(count);
    return result;
  };
}

}  // namespace tessera
