#pragma once

#include <tessera/export.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/placement/layout.h>
#include <tessera/placement/placement.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/OptionalArrayRef.h>

namespace tessera {

/// Everything known about a distributed tensor but its data: the mesh, the placements, and the global
/// shape, strides and dtype. An immutable value behind a cheap handle.
///
/// Specs are interned: equal ones made anywhere in the process are one object, so that comparing and hashing
/// look at an address only. The object goes with its last handle. Safe to use from any thread.
///
/// A default-made Spec is undefined: it converts to false, and asking it anything else is an error.
class TESSERA_API Spec {
 public:
  Spec() = default;

  /// Placements are normalized and the order made canonical, so that equal layouts are equal specs.
  /// Without strides the tensor is contiguous. Throws, naming the culprit, unless there is one placement for
  /// each mesh dim, tensor dims exist, sizes are not negative, strides fit the shape, and partial ops agree.
  ///   Spec(mesh, {Shard(0), Replicate()}, {4096, 1024}, std::nullopt, at::kBFloat16)
  Spec(const DeviceMesh& mesh, c10::ArrayRef<Placement> placements, c10::IntArrayRef shape,
       c10::OptionalIntArrayRef strides = std::nullopt, c10::ScalarType dtype = c10::ScalarType::Float,
       c10::IntArrayRef order = {});

  explicit operator bool() const { return state_ != nullptr; }

  const DeviceMesh& mesh() const { return state().mesh; }
  const Placements& placements() const { return state().placements; }
  const Placement& placement(size_t mesh_dim) const { return state().placements[mesh_dim]; }
  /// The shard order in its canonical form: empty unless it differs from the default.
  const ShardOrder& order() const { return state().order; }
  c10::IntArrayRef shape() const { return state().shape; }
  c10::IntArrayRef strides() const { return state().strides; }
  c10::ScalarType dtype() const { return state().dtype; }
  int64_t ndim() const { return static_cast<int64_t>(state().shape.size()); }
  int64_t numel() const { return state().numel; }

  /// Of the local tensor of this rank. Outside the mesh: shape [0], an empty offset and no pieces.
  c10::IntArrayRef local_shape() const { return state().local.shape; }
  c10::IntArrayRef global_offset() const { return state().local.offset; }
  /// Of a dense local tensor, whose dims lie in memory in the order that `strides` say. The local tensor of
  /// every DTensor has them if the spec is dense; see redistribute/memory.h.
  c10::IntArrayRef local_strides() const { return state().local_strides; }
  std::vector<Pieces> local_pieces() const;

  /// The same of the rank at a coordinate of the mesh.
  c10::DimVector local_shape(c10::IntArrayRef coordinate) const;
  c10::DimVector global_offset(c10::IntArrayRef coordinate) const;
  std::vector<Pieces> local_pieces(c10::IntArrayRef coordinate) const;

  /// The strides leave no gaps and nothing overlaps: those of a tensor of its own, not of a slice, a diagonal
  /// or an expanded dim.
  bool is_dense() const { return state().dense; }
  /// Every rank has the full tensor.
  bool is_replicated() const { return state().replicated; }
  /// Some mesh dim shards the tensor, strided or not, even if that mesh dim has size 1.
  bool is_sharded() const { return state().sharded; }
  /// Some mesh dim, even one of size 1, has yet to be reduced.
  bool has_partial() const { return state().partial; }

  /// The same tensor with other placements, and the default order unless given one. Redistribution gives it
  /// memory of its own, so that the strides are dense then, with the dims in the same order.
  Spec with_placements(c10::ArrayRef<Placement> placements, c10::IntArrayRef order = {}) const;

  friend bool operator==(const Spec& a, const Spec& b) { return a.state_ == b.state_; }
  size_t hash() const { return std::hash<const void*>()(id()); }
  /// An address that equal specs share and, as long as one of them exists, no others have. Null if undefined.
  const void* id() const { return state_.get(); }

  /// "[S(0), P(sum)] on mesh(dp=2, tp=4): f32[4096, 1024]"; see text.h.
  std::string str() const;
  friend TESSERA_API std::ostream& operator<<(std::ostream& out, const Spec& spec);

  /// How many different specs exist in the process now.
  static size_t interned_count();

 private:
  struct State {
    DeviceMesh mesh;
    Placements placements;
    ShardOrder order;
    c10::DimVector shape;
    c10::DimVector strides;
    c10::ScalarType dtype;

    // What follows from the above.
    size_t hash = 0;
    int64_t numel = 0;
    LocalBox local = {};
    c10::DimVector local_strides = {};
    bool dense = true;
    bool replicated = false;
    bool sharded = false;
    bool partial = false;
  };
  class Table;

  const State& state() const {
    if (state_ == nullptr) [[unlikely]]
      undefined();
    return *state_;
  }
  [[noreturn]] static void undefined();
  static size_t hash_of(const State& state);
  static bool equal(const State& a, const State& b);
  static void complete(State& state);

  std::shared_ptr<const State> state_;
};

/// The placements of a tensor that is replicated on all dims of `mesh`.
TESSERA_API Placements replicated(const DeviceMesh& mesh);

}  // namespace tessera

template <>
struct std::hash<tessera::Spec> {
  size_t operator()(const tessera::Spec& spec) const { return spec.hash(); }
};
