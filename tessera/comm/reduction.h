#pragma once

#include <cstddef>
#include <cstdint>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

/// What collectives do with the values of tensors, whoever moves them.
namespace tessera::comm {

/// Whether `reduce_values` has the reduction for the dtype: see comm/collectives.h.
bool can_reduce(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);
/// Whether the transports (gloo, nccl) reduce such values by themselves.
bool transport_reduces(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);

/// target[t][i] = op(source[0][i], source[1][i], ...) for all targets t and 0 <= i < elements, always in this
/// order, so that results are the same whoever computes them. Half and bfloat16 are accumulated in float and
/// rounded once. NaN wins in min and max. Integers wrap, but not in avg, which rounds toward zero; bool adds
/// as "or". A source may be a target.
void reduce_values(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op, double factor,
                   std::byte* const* sources, int64_t source_count, std::byte* const* targets,
                   int64_t target_count, int64_t first, int64_t elements);

/// `streaming`: past the caches, for what is too much to stay in them; faster then, slower
/// else.
void copy_bytes(std::byte* target, const std::byte* source, size_t bytes, bool streaming);

}  // namespace tessera::comm
