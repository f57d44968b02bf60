#pragma once

#include <tessera/placement/spec.h>

#include <ATen/core/Tensor.h>

/// Global indices as indices into what a rank holds. Nothing communicates here.
namespace tessera::kernels {

/// How an operator of libtorch takes indices.
struct IndexKind {
  bool wraps = false;          // negative ones count from the end
  bool is_index_error = true;  // one out of range raises an IndexError; else another error
};

/// Indices into a dim of which this rank holds a contiguous range: `other` for those that point elsewhere,
/// and a mask of these. Throws if one is outside of the dim.
struct LocalIndices {
  at::Tensor indices, elsewhere;
  LocalIndices(const at::Tensor& global, const Spec& spec, int64_t dim, int64_t other, IndexKind kind = {});
};

/// Indices into a tensor whose elements count row by row, of which this rank holds a contiguous range of each
/// dim. Negative ones count from the end; throws if one is out of range.
struct LocalElements {
  at::Tensor is_local;  // of each index
  at::Tensor indices;   // among the local elements; 0 for those that are elsewhere
  LocalElements(const at::Tensor& global, const Spec& spec);
};

}  // namespace tessera::kernels
