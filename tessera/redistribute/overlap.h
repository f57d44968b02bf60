#pragma once

#include <tessera/export.h>
#include <tessera/placement/chunk.h>

namespace tessera {

/// The elements of one tensor dim that two ranks have in common, as positions in the local tensor of either.
/// Both lists have the same length in elements and name the same elements in the same order.
struct Overlap {
  Pieces in_a;
  Pieces in_b;
};

///   overlap({{0, 4}}, {{2, 4}})          ->  in_a {{2, 2}}, in_b {{0, 2}}
///   overlap({{0, 2}, {4, 2}}, {{1, 4}})  ->  in_a {{1, 2}}, in_b {{0, 1}, {3, 1}}
/// Linear in the number of pieces.
TESSERA_API Overlap overlap(const Pieces& a, const Pieces& b);

/// How many elements that is.
///   shared_length({{0, 4}}, {{2, 4}}) == 2
TESSERA_API int64_t shared_length(const Pieces& a, const Pieces& b);

}  // namespace tessera
