#pragma once

#include <tessera/placement/chunk.h>

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

/// Attention of some queries to some keys at a time. What a query gets from several sets of keys is merged by
/// the log-sum-exp of its scores with each.
namespace tessera::kernels {

/// `size` elements of a sequence from `index` on, which are the positions from `position` on.
struct SequenceRun {
  int64_t index, position, size;
  bool operator==(const SequenceRun&) const = default;
};
using SequenceRuns = std::vector<SequenceRun>;

/// A sequence in order, and one in zig-zag order for so many ranks: of its shard, each has the first half from the
/// front of the sequence and the second half from the back.
///   zigzag_runs(8, 2)  ->  {0, 0, 2}, {2, 6, 2}, {4, 2, 2}, {6, 4, 2}
SequenceRuns runs_in_order(int64_t length);
SequenceRuns zigzag_runs(int64_t length, int64_t ranks);

/// The runs of a sequence of which only these elements are local; their indices are those of the local tensor.
///   {{0, 0, 4}, {4, 8, 4}} at {{2, 4}}  ->  {{0, 2, 2}, {2, 8, 2}}
SequenceRuns local_runs(const SequenceRuns& runs, const Pieces& pieces);

/// Queries and keys of which each query sees all keys or, on the diagonal, those up to its own index.
struct AttentionBlock {
  Range queries, keys;  // of the local tensors
  bool diagonal = false;
};

/// Which blocks there are between queries and keys. Causal: a query sees the keys up to its own position.
///   one run of 4 queries and keys each, at positions 0: {0+4, 0+4, diagonal}; at 4 and 0: {0+4, 0+4}
std::vector<AttentionBlock> attention_blocks(const SequenceRuns& queries, const SequenceRuns& keys,
                                             bool causal);

/// Tensors have the dims (batch, heads, length, size); several heads of queries may share one of keys and
/// values.
struct Attended {
  at::Tensor output;     // of the wider dtype in which it is summed
  at::Tensor logsumexp;  // (batch, heads, length), likewise
};
/// Of queries that have seen no keys yet. In memory it is (batch, length, heads, size), as libtorch's is.
Attended nothing_attended(const at::Tensor& query, int64_t value_size);

/// Adds what the queries get from these keys.
void attend(const Attended& sum, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
            const std::vector<AttentionBlock>& blocks, std::optional<double> scale);

/// What is needed of the result of attention for its gradients.
struct AttentionResult {
  at::Tensor gradient, output, logsumexp;
};
struct AttentionGradients {
  at::Tensor query, key, value;  // of the wider dtype
};
/// Adds the gradients of these keys and values, and what of the gradient of the queries comes from them.
void attend_backward(const AttentionGradients& sum, const AttentionResult& result, const at::Tensor& query,
                     const at::Tensor& key, const at::Tensor& value,
                     const std::vector<AttentionBlock>& blocks, std::optional<double> scale);

}  // namespace tessera::kernels
