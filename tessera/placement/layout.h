#pragma once

#include <tessera/export.h>
#include <tessera/placement/chunk.h>
#include <tessera/placement/placement.h>

#include <cstdint>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

/// Which rank has which elements: pure functions of a tensor's global shape, the shape of a mesh, one
/// placement for each mesh dim, the shard order, and a coordinate in the mesh. No ranks and no communication.
///
/// Placements may have negative dims. Arguments that do not fit together are errors that say how.

namespace tessera {

/// The order in which mesh dims shard the tensor: a permutation of them, or empty for 0, 1, 2, ...
/// It matters only among mesh dims that shard the same tensor dim.
using ShardOrder = c10::SmallVector<int64_t, 4>;

/// The one order among all that give the same layout: mesh dims that shard the same tensor dim stand, in
/// the order given, where these mesh dims stand by default; all others stay; empty if nothing moves.
///   placements [S(0), S(1), S(0)]:  (1, 2, 0) -> (2, 1, 0)      (1, 0, 2) -> ()
/// The placements must be normalized. Throws if `order` is not a permutation of the mesh dims.
TESSERA_API ShardOrder canonical_order(c10::IntArrayRef order, c10::ArrayRef<Placement> placements);

/// The local pieces of each tensor dim on the rank at `coordinate`.
///   shape [8], mesh (2, 2), [SS(0, 2), R], coordinate (1, 0) -> {{{2, 2}, {6, 2}}}
TESSERA_API std::vector<Pieces> local_pieces(c10::IntArrayRef shape, c10::IntArrayRef mesh_shape,
                                             c10::ArrayRef<Placement> placements, c10::IntArrayRef order,
                                             c10::IntArrayRef coordinate);

/// The local shape on the rank at `coordinate`.
///   shape [10, 3], mesh (4), [S(0)], coordinate (3) -> [1, 3]
TESSERA_API c10::DimVector local_shape(c10::IntArrayRef shape, c10::IntArrayRef mesh_shape,
                                       c10::ArrayRef<Placement> placements, c10::IntArrayRef order,
                                       c10::IntArrayRef coordinate);

struct LocalBox {
  c10::DimVector shape;
  /// Where the first element lies in the global tensor; along dims of which the rank has nothing, their
  /// global size.
  c10::DimVector offset;
};

/// The same, and where it begins.
///   shape [10, 3], mesh (4), [S(0)], coordinate (3) -> [1, 3] at [9, 0]
///   shape [2, 3],  mesh (4), [S(0)], coordinate (3) -> [0, 3] at [2, 0]
/// With a strided shard the local tensor may have gaps: `local_pieces` says where.
TESSERA_API LocalBox local_shape_and_global_offset(c10::IntArrayRef shape, c10::IntArrayRef mesh_shape,
                                                   c10::ArrayRef<Placement> placements,
                                                   c10::IntArrayRef order, c10::IntArrayRef coordinate);

/// The global shape if the local shape is the same on every rank.
///   local [2, 3], mesh (2, 4), [S(0), S(0)] -> [16, 3]
TESSERA_API c10::DimVector global_shape_if_even(c10::IntArrayRef local_shape, c10::IntArrayRef mesh_shape,
                                                c10::ArrayRef<Placement> placements);

/// The global shape, from the local shapes of all ranks in row-major order of their coordinates.
///   locals [3], [3], [3], [1], mesh (4), [S(0)] -> [10]
/// Throws, naming the first rank that differs, unless every rank has exactly the shape that `local_shape`
/// gives.
TESSERA_API c10::DimVector global_shape_from_locals(c10::ArrayRef<c10::DimVector> local_shapes,
                                                    c10::IntArrayRef mesh_shape,
                                                    c10::ArrayRef<Placement> placements,
                                                    c10::IntArrayRef order = {});

/// The strides of a dense tensor of shape `local_shape` whose dims lie in memory in the order that
/// `global_strides` imply.
///   strides (1, 4), local shape [2, 3] -> (1, 2)
TESSERA_API c10::DimVector local_strides(c10::IntArrayRef global_strides, c10::IntArrayRef local_shape);

/// The dims from the outermost, which has the largest stride, to the innermost. Dims of equal strides keep
/// their order, and a stride of 0 (an expanded dim) says nothing, as in libtorch's own inference of dense
/// strides.
///   strides (1, 8, 4) -> [1, 2, 0]      strides (0, 1) -> [0, 1]
TESSERA_API c10::DimVector outer_to_inner(c10::IntArrayRef strides);

}  // namespace tessera
