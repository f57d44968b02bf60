#pragma once

#include <tessera/kernels/call.h>
#include <tessera/placement/spec.h>

/// Embeddings whose weight has its rows sharded: what a rank computes of the rows that it holds, which are
/// one contiguous range. All take the arguments of the operator, with local tensors, and the spec of the
/// weight.
namespace tessera::kernels {

/// As libtorch counts them.
enum BagMode : int64_t { kSum = 0, kMean = 1, kMax = 2 };

/// embedding: zeros for rows that other ranks hold.
Stack embedding_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack arguments);
/// tessera::embedding_backward: the gradient of the local rows.
Stack gradient_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack arguments);

/// _embedding_bag: partial sums, or means, of the local rows. The largest are those of all ranks: these are
/// found by two reductions, so that mode kMax is collective.
Stack bags_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack arguments);
/// tessera::embedding_bag_backward, of sums and means.
Stack bag_gradient_of_local_rows(const Spec& weight, const c10::OperatorHandle& op, Stack arguments);
/// _embedding_bag_per_sample_weights_backward: partial sums.
Stack sample_weight_gradient_of_local_rows(const Spec& weight, const c10::OperatorHandle& op,
                                           Stack arguments);

}  // namespace tessera::kernels
