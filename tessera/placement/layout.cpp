#include <tessera/error.h>
#include <tessera/placement/layout.h>

#include <algorithm>
#include <numeric>

namespace tessera {

namespace {

using c10::ArrayRef;
using c10::DimVector;
using c10::IntArrayRef;

// 0, 1, 2, ...
template <typename Vector>
Vector numbers(size_t count) {
  Vector out;
  out.resize(count);
  std::iota(out.begin(), out.end(), 0);
  return out;
}

ShardOrder default_order(size_t mesh_ndim) { return numbers<ShardOrder>(mesh_ndim); }

// The order with the default written out.
ShardOrder explicit_order(IntArrayRef order, size_t mesh_ndim) {
  if (order.empty()) return default_order(mesh_ndim);
  const ShardOrder all = default_order(mesh_ndim);
  TESSERA_CHECK_VALUE(std::is_permutation(order.begin(), order.end(), all.begin(), all.end()),
                      "the shard order ", order, " is not a permutation of the ", mesh_ndim,
                      " mesh dims: expected each of ", all,
                      " exactly once, or nothing for the default order");
  return {order.begin(), order.end()};
}

void check_mesh(IntArrayRef mesh_shape, ArrayRef<Placement> placements) {
  TESSERA_CHECK_VALUE(placements.size() == mesh_shape.size(), "got ", placements.size(), " placements ",
                      placements, " for a mesh of shape ", mesh_shape, ": expected one for each of its ",
                      mesh_shape.size(), " dims");
  for (size_t i = 0; i < mesh_shape.size(); ++i) {
    TESSERA_CHECK_VALUE(mesh_shape[i] >= 1, "mesh dim ", i, " of a mesh of shape ", mesh_shape,
                        " has no ranks: expected a size of at least 1");
  }
}

void check_coordinate(IntArrayRef mesh_shape, IntArrayRef coordinate) {
  bool inside = coordinate.size() == mesh_shape.size();
  for (size_t i = 0; inside && i < mesh_shape.size(); ++i) {
    inside = coordinate[i] >= 0 && coordinate[i] < mesh_shape[i];
  }
  TESSERA_CHECK_INDEX(inside, "there is no coordinate ", coordinate, " in a mesh of shape ", mesh_shape);
}

// Moves to the next coordinate in row-major order; after the last comes the first.
void advance(DimVector& coordinate, IntArrayRef mesh_shape) {
  for (size_t i = mesh_shape.size(); i-- > 0;) {
    if (++coordinate[i] < mesh_shape[i]) return;
    coordinate[i] = 0;
  }
}

}  // namespace

ShardOrder canonical_order(IntArrayRef order, ArrayRef<Placement> placements) {
  const size_t ndim = placements.size();
  const ShardOrder given = explicit_order(order, ndim);
  ShardOrder out = default_order(ndim);
  for (size_t first = 0; first < ndim; ++first) {
    if (!placements[first].is_shard_like()) continue;
    const int64_t dim = placements[first].dim();
    const auto shards_dim = [&](int64_t mesh_dim) { return placements[mesh_dim].is_shard_like(dim); };
    auto next = given.begin();
    for (size_t i = 0; i < ndim; ++i) {
      if (shards_dim(i)) out[i] = *(next = std::find_if(next, given.end(), shards_dim))++;
    }
  }
  if (out == default_order(ndim)) out.clear();
  return out;
}

std::vector<Pieces> local_pieces(IntArrayRef shape, IntArrayRef mesh_shape, ArrayRef<Placement> placements,
                                 IntArrayRef order, IntArrayRef coordinate) {
  check_mesh(mesh_shape, placements);
  check_coordinate(mesh_shape, coordinate);
  const Placements normal = normalize(placements, static_cast<int64_t>(shape.size()));
  std::vector<Pieces> pieces(shape.size());
  std::transform(shape.begin(), shape.end(), pieces.begin(), unsharded);
  for (const int64_t i : explicit_order(order, mesh_shape.size())) {
    if (!normal[i].is_shard_like()) continue;
    Pieces& local = pieces[normal[i].dim()];
    // By the global size, so that all ranks agree.
    check_split(shape[normal[i].dim()], normal[i].split());
    local = strided_shard(local, normal[i].split(), mesh_shape[i], coordinate[i]);
  }
  return pieces;
}

DimVector local_shape(IntArrayRef shape, IntArrayRef mesh_shape, ArrayRef<Placement> placements,
                      IntArrayRef order, IntArrayRef coordinate) {
  return local_shape_and_global_offset(shape, mesh_shape, placements, order, coordinate).shape;
}

LocalBox local_shape_and_global_offset(IntArrayRef shape, IntArrayRef mesh_shape,
                                       ArrayRef<Placement> placements, IntArrayRef order,
                                       IntArrayRef coordinate) {
  const auto pieces = local_pieces(shape, mesh_shape, placements, order, coordinate);
  LocalBox box;
  for (size_t i = 0; i < shape.size(); ++i) {
    box.shape.push_back(length(pieces[i]));
    box.offset.push_back(pieces[i].empty() ? shape[i] : pieces[i].front().offset);
  }
  return box;
}

DimVector global_shape_if_even(IntArrayRef local_shape, IntArrayRef mesh_shape,
                               ArrayRef<Placement> placements) {
  check_mesh(mesh_shape, placements);
  const Placements normal = normalize(placements, static_cast<int64_t>(local_shape.size()));
  DimVector shape(local_shape.begin(), local_shape.end());
  for (size_t i = 0; i < normal.size(); ++i) {
    if (!normal[i].is_shard_like()) continue;
    int64_t& size = shape[normal[i].dim()];
    TESSERA_CHECK_VALUE(!__builtin_mul_overflow(size, mesh_shape[i], &size), "local tensors of shape ",
                        local_shape, " with placements ", placements, " on a mesh of shape ", mesh_shape,
                        " have more elements together than can be counted");
  }
  return shape;
}

DimVector global_shape_from_locals(ArrayRef<DimVector> local_shapes, IntArrayRef mesh_shape,
                                   ArrayRef<Placement> placements, IntArrayRef order) {
  check_mesh(mesh_shape, placements);
  int64_t ranks = 1;
  for (const int64_t size : mesh_shape) {
    TESSERA_CHECK_VALUE(!__builtin_mul_overflow(ranks, size, &ranks), "a mesh of shape ", mesh_shape,
                        " has more ranks than can be counted");
  }
  TESSERA_CHECK_VALUE(static_cast<int64_t>(local_shapes.size()) == ranks, "got ", local_shapes.size(),
                      " local shapes for a mesh of shape ", mesh_shape, ": expected one for each of its ",
                      ranks, " ranks");
  const size_t ndim = local_shapes.front().size();
  const Placements normal = normalize(placements, static_cast<int64_t>(ndim));

  // Along each tensor dim, the ranks that differ only in the mesh dims that shard it have all of it between
  // them.
  DimVector shape(ndim, 0);
  DimVector coordinate(mesh_shape.size(), 0);
  for (const DimVector& local : local_shapes) {
    TESSERA_CHECK_VALUE(local.size() == ndim, "the rank at ", coordinate, " has a local tensor of shape ",
                        local, ", which has ", local.size(), " dims: expected ", ndim, " as in shape ",
                        local_shapes.front(), " of the first rank");
    for (size_t dim = 0; dim < ndim; ++dim) {
      bool counts = true;
      for (size_t i = 0; counts && i < normal.size(); ++i) {
        counts = coordinate[i] == 0 || normal[i].is_shard_like(static_cast<int64_t>(dim));
      }
      TESSERA_CHECK_VALUE(!counts || !__builtin_add_overflow(shape[dim], local[dim], &shape[dim]),
                          "the local tensors have more elements together along dim ", dim,
                          " than can be counted; the rank at ", coordinate, " has shape ", local);
    }
    advance(coordinate, mesh_shape);
  }

  for (const DimVector& local : local_shapes) {
    const DimVector expected = tessera::local_shape(shape, mesh_shape, normal, order, coordinate);
    TESSERA_CHECK_VALUE(local == expected, "the rank at ", coordinate, " of a mesh of shape ", mesh_shape,
                        " has a local tensor of shape ", local, ", but of a global shape ", shape,
                        " with placements ", placements, " it should have ", expected,
                        ": shards must be as torch.chunk splits them");
    advance(coordinate, mesh_shape);
  }
  return shape;
}

DimVector local_strides(IntArrayRef global_strides, IntArrayRef local_shape) {
  TESSERA_CHECK_VALUE(global_strides.size() == local_shape.size(), "strides ", global_strides,
                      " and local shape ", local_shape,
                      " differ in length: expected one stride for each dim");
  const DimVector order = outer_to_inner(global_strides);
  DimVector strides(local_shape.size());
  int64_t stride = 1;
  for (size_t i = local_shape.size(); i-- > 0;) {
    const int64_t dim = order[i];
    strides[dim] = stride;
    TESSERA_CHECK_VALUE(!__builtin_mul_overflow(stride, std::max<int64_t>(local_shape[dim], 1), &stride),
                        "a tensor of shape ", local_shape, " has more elements than can be counted");
  }
  return strides;
}

DimVector outer_to_inner(IntArrayRef strides) {
  DimVector dims = numbers<DimVector>(strides.size());
  // By insertion from the inside out: past a stride of 0 the search goes on, where a sort would need an
  // order.
  for (size_t last = dims.size(); last-- > 0;) {
    size_t at = last;
    for (size_t i = last + 1; i < dims.size(); ++i) {
      const int64_t inner = strides[dims[i]], moving = strides[dims[at]];
      if (inner == 0 || moving == 0 || inner == moving) continue;
      if (inner < moving) break;
      std::rotate(dims.begin() + at, dims.begin() + at + 1, dims.begin() + i + 1);
      at = i;
    }
  }
  return dims;
}

}  // namespace tessera
