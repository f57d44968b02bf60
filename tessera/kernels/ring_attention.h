#pragma once

#include <tessera/comm/world.h>
#include <tessera/kernels/attention_blocks.h>

#include <optional>
#include <vector>

/// Attention over a sequence that is sharded along the ranks of a group. Keys and values travel around the ring
/// of ranks, one message for both, while each rank attends to what it has; no rank ever has more than two shards
/// of them. So a rank sends n - 1 of n shards of keys and values in forward, and in backward these again and as
/// many of their gradients, which are summed on the way, in the wider dtype.
namespace tessera::kernels {

/// Who has what of the sequence. `keys` has an entry for each rank of the group; without a group it has one, and
/// the rank attends to what it has itself.
struct AttentionRing {
  Group group = {};
  size_t self = 0;
  SequenceRuns queries = {};  // of this rank
  std::vector<SequenceRuns> keys = {};
  bool causal = false;
  std::optional<double> scale = {};
};

/// Collective. `logsumexp` and `output` are needed in backward.
Attended ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const AttentionRing& ring);

/// The gradients of this rank's queries, keys and values, of their dtype. Collective.
AttentionGradients ring_attention_backward(const AttentionResult& result, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& value,
                                           const AttentionRing& ring);

}  // namespace tessera::kernels
