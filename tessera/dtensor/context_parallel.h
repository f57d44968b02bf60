#pragma once

#include <tessera/export.h>
#include <tessera/thread_scope.h>

#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

/// Attention over a sequence that is sharded: `scaled_dot_product_attention` of distributed queries, keys and
/// values of dims (batch, heads, length, size) whose length is sharded. The output is sharded as the queries are.
namespace tessera {

/// How the ranks attend to keys and values that other ranks have. docs/parallel.md says what each costs.
enum class ContextMethod {
  allgather,  ///< Each rank gathers all keys and values.
  ulysses,    ///< An all-to-all shards heads instead of the sequence, and another one shards the output back.
  ring,       ///< Keys and values travel around the ranks; none ever has all of them.
};

/// "allgather", "ulysses" or "ring", and back; anything else is an error.
TESSERA_API std::string_view name_of(ContextMethod method);
TESSERA_API ContextMethod context_method(std::string_view name);

struct ContextParallelOptions {
  ContextMethod method = ContextMethod::ring;
  /// The elements of the sequence are in the order that `to_zigzag` gives them, for as many ranks as shard it:
  /// `is_causal` goes by their positions, or is an error where it cannot. A mask is in this order already.
  bool zigzag = false;

  friend bool operator==(const ContextParallelOptions&, const ContextParallelOptions&) = default;
};

/// While it lives, attention of this thread over a sharded sequence is computed in that way; without it the
/// cheaper one of allgather and ulysses is taken. A call that the method cannot do is an error that names those
/// that can. Gradients are computed in the way of their forward, wherever backward is called, and so is what activation
/// checkpointing computes again; where the thread has made calls of the same queries in several ways, that is an error.
class TESSERA_API ContextParallelGuard {
 public:
  explicit ContextParallelGuard(ContextParallelOptions options);
  ~ContextParallelGuard();
  ContextParallelGuard(const ContextParallelGuard&) = delete;
  ContextParallelGuard& operator=(const ContextParallelGuard&) = delete;

 private:
  ThreadScope<std::optional<ContextParallelOptions>, ContextParallelGuard> scope_;
};

/// What the innermost guard of the calling thread says; nothing if there is none.
TESSERA_API const std::optional<ContextParallelOptions>& context_parallel_options();

/// Which position each element of a sequence has in zig-zag order, as int64. Sharded along `ranks` ranks, each
/// has one piece from the front and one from the back of the sequence, so that causal attention gives all of
/// them the same work, where a rank with the last positions has the most otherwise.
///   zigzag_order(8, 2)  ->  0 1 6 7 | 2 3 4 5
TESSERA_API at::Tensor zigzag_order(int64_t length, int64_t ranks);

/// `tensor` with the elements of `dim` in zig-zag order for `ranks` ranks, and back. Inputs, targets and position
/// ids of a model must be reordered alike, once for a batch. Differentiable; of plain or distributed tensors.
TESSERA_API at::Tensor to_zigzag(const at::Tensor& tensor, int64_t dim, int64_t ranks);
TESSERA_API at::Tensor from_zigzag(const at::Tensor& tensor, int64_t dim, int64_t ranks);

}  // namespace tessera
