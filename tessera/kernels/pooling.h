#pragma once

#include <tessera/kernels/window.h>
#include <tessera/rules/strategy.h>

#include <optional>
#include <vector>

/// Pooling over planes, the last dims, where these are sharded: each rank fetches the halo that its shard of
/// the result needs.
namespace tessera::kernels {

/// Windows that slide over the planes.
struct SlidingPool {
  int64_t first = 0;                // dim of the planes
  std::vector<int64_t> sizes = {};  // of the planes' dims, in the input
  std::vector<Sliding> windows = {};
  /// What an average is divided by: this, or the size of the window, with the padding in it or without.
  std::optional<int64_t> divisor = {};
  bool counts_padding = true;
};

/// Windows as large as it takes to have as many as are wanted.
struct AdaptivePool {
  int64_t first = 0;
  std::vector<int64_t> sizes = {}, wanted = {};  // of the planes' dims, in the input and the result
};

enum class Pool { max, max_backward, avg, avg_backward };
inline bool is_backward(Pool kind) { return kind == Pool::max_backward || kind == Pool::avg_backward; }

/// What a rank computes of such an operator where planes are sharded; elsewhere it is what the operator
/// computes. `self`: the index of the input among the call's tensors. Gradients come first among these, and
/// maxima have the argument `indices`, in the global planes.
rules::Localize pooled(const SlidingPool& pool, Pool kind, size_t self);
rules::Localize pooled(const AdaptivePool& pool, Pool kind, size_t self);

}  // namespace tessera::kernels
