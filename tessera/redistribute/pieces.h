#pragma once

#include <tessera/export.h>
#include <tessera/placement/chunk.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace tessera {

/// The elements of `tensor` at these pieces of each dim, in order: a view if no dim has more than one piece,
/// else a copy. With the local pieces of a rank, the local tensor of that rank.
///   [[0, 1, 2], [3, 4, 5]] at {{1, 1}}, {{0, 1}, {2, 1}}  ->  [[3, 5]]
TESSERA_API at::Tensor select_pieces(at::Tensor tensor, c10::ArrayRef<Pieces> pieces);

/// Writes `values` to where select_pieces(tensor, pieces) takes its elements from.
TESSERA_API void copy_into_pieces(const at::Tensor& tensor, c10::ArrayRef<Pieces> pieces,
                                  const at::Tensor& values);

}  // namespace tessera
