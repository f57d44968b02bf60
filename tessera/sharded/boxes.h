#pragma once

#include <tessera/export.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/FunctionRef.h>

namespace tessera::sharded {

/// A box in n dims; it does not own its offsets and sizes.
struct Box {
  c10::IntArrayRef offsets;
  c10::IntArrayRef sizes;

  int64_t end(size_t dim) const { return offsets[dim] + sizes[dim]; }
};

/// What two boxes share. Nothing if that is empty.
struct Intersection {
  c10::DimVector offsets;
  c10::DimVector sizes;
};
TESSERA_API std::optional<Intersection> intersect(const Box& a, const Box& b);

/// Calls `visit(i, j)` once for each pair of boxes a[i] and b[j] that share elements, in no particular order,
/// until it returns true. Empty boxes share nothing. All boxes must have the same number of dims.
///
/// With n boxes, k pairs and d dims in which the boxes differ: O(n log^d n + k) whatever their shapes are.
TESSERA_API void for_each_overlap(c10::ArrayRef<Box> a, c10::ArrayRef<Box> b,
                                  c10::function_ref<bool(size_t i, size_t j)> visit);

/// The lexicographically first element of a tensor of that shape that is in none of the boxes, which must not
/// overlap nor reach beyond it. Nothing if there is none.
TESSERA_API std::optional<std::vector<int64_t>> find_gap(c10::ArrayRef<Box> boxes, c10::IntArrayRef shape);

}  // namespace tessera::sharded
