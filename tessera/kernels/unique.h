#pragma once

#include <tessera/kernels/call.h>
#include <tessera/kernels/exchange.h>

namespace tessera::kernels {

/// What a call of unique and its kin asks for besides the values.
struct UniqueResults {
  bool inverse = false;
  bool counts = false;
  bool has_counts = false;  // the operator has such a result at all
};

/// The operator on a local tensor that is all there is; results that are not asked for are empty: libtorch
/// gives some unasked.
Stack unique(const c10::OperatorHandle& op, Stack arguments, const UniqueResults& wanted);

/// The same of a tensor of which each rank has a part: what ranks found each by itself, along `dim`, by the
/// operator again. Values and counts are the same on all ranks; the inverse is of the local elements.
/// Collective.
Stack unique_of_all(const c10::OperatorHandle& op, Stack arguments, const UniqueResults& wanted,
                    const ShardGroup& ranks, int64_t dim);

}  // namespace tessera::kernels
