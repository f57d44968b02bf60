#pragma once

#include <tessera/placement/spec.h>
#include <tessera/redistribute/plan.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

/// The layouts between two specs, as the planner's search sees them. Pure arithmetic; nothing here knows
/// costs or steps.
namespace tessera {

using Dims = c10::SmallVector<int64_t, 4>;

/// How one mesh dim shards a tensor dim.
struct DimShard {
  int64_t mesh_dim;
  int64_t split;
  bool operator==(const DimShard&) const = default;
};

/// The mesh dims that shard one tensor dim, the outermost first.
using DimShards = c10::SmallVector<DimShard, 4>;

/// How many shards, from the outermost on, the two have in common.
size_t common_prefix(const DimShards& a, const DimShards& b);
bool has(const DimShards& shards, int64_t mesh_dim);

/// One layout of a LayoutSpace: for each axis the mesh dims that shard it, and the set of mesh dims that
/// still have the partial values of the source. All other mesh dims replicate.
struct LayoutNode {
  uint64_t pending = 0;                          // mesh dims with partial values, as bits
  c10::SmallVector<uint16_t, 6> shardings = {};  // by axis: an index that LayoutSpace::sharding gave
  bool operator==(const LayoutNode&) const = default;
  size_t hash() const {
    size_t out = pending;
    for (const uint16_t sharding : shardings) out = c10::hash_combine(out, sharding);
    return out;
  }
};

/// The layouts of one tensor on its way from one spec to another.
///
/// An axis is a tensor dim that some layout shards. Each sharding of an axis gets an index when it is first
/// met, and its local pieces on the sampled ranks are worked out once. Bytes are those of the busiest of
/// these ranks: of all, if they are few, else of those at the corners of the mesh. Mesh dims of size 1 do not
/// exist here. The specs must outlive the space.
class LayoutSpace {
 public:
  LayoutSpace(const Spec& from, const Spec& to);

  const Spec& from() const { return from_; }
  const Spec& to() const { return to_; }
  /// The layout of `from`.
  const LayoutNode& start() const { return start_; }
  Spec spec_of(const LayoutNode& x) const;

  int64_t mesh_ndim() const { return static_cast<int64_t>(mesh_shape_.size()); }
  int64_t ranks(int64_t mesh_dim) const { return mesh_shape_[mesh_dim]; }
  bool exists(int64_t mesh_dim) const { return ranks(mesh_dim) > 1; }
  const Placement& target(int64_t mesh_dim) const { return to_.placement(mesh_dim); }

  size_t axes() const { return tensor_dims_.size(); }
  int64_t tensor_dim(size_t axis) const { return tensor_dims_[axis]; }
  const DimShards& target_shards(size_t axis) const { return target_shards_[axis]; }
  const DimShards& shards(const LayoutNode& x, size_t axis) const {
    return shardings_[axis][x.shardings[axis]].shards;
  }
  /// The index of a sharding of an axis.
  uint16_t sharding(size_t axis, const DimShards& shards);

  static bool is_pending(const LayoutNode& x, int64_t mesh_dim) { return x.pending >> mesh_dim & 1; }
  /// The mesh dims whose partial values the target does not have, and that are not reduced yet.
  Dims pending_dims(const LayoutNode& x) const;
  bool is_sharded(const LayoutNode& x, int64_t mesh_dim) const;
  /// Whether shards along the mesh dim become partial values without communication.
  bool can_become_partial(int64_t mesh_dim) const;
  /// The shards of the target, without those that wait for a reduction, and then those that become partial
  /// values.
  DimShards wanted(const LayoutNode& x, size_t axis) const;
  /// Whether only partial values have to be made.
  bool is_goal(const LayoutNode& x) const;

  /// Whether all ranks are sampled, so that bytes are exact.
  bool all_sampled() const { return all_sampled_; }
  /// What the busiest rank receives in a step between two layouts.
  int64_t bytes_of(const LayoutNode& x, const LayoutNode& y, StepKind kind, const Dims& mesh_dims) const;
  /// What it needs of `y` and does not have in `x`.
  int64_t most_received(const LayoutNode& x, const LayoutNode& y) const;
  /// The same over all ranks, unless those that matter are more than `limit`.
  std::optional<int64_t> most_received_of_all(const LayoutNode& x, const LayoutNode& y, int64_t limit) const;
  /// No more than what the busiest rank still has to receive on any way to the target.
  double fewest_bytes_left(const LayoutNode& x) const;

 private:
  struct Sharding {
    DimShards shards;
    // For each sampled rank: its pieces, their length, and how much of that it has in the target too.
    c10::SmallVector<Pieces, 4> pieces = {};
    Dims length = {};
    Dims kept = {};
  };

  size_t axis_of(int64_t tensor_dim);  // which becomes one if it was none
  void add_axis_to_spread_along();
  std::vector<DimShards> shards_of(const Spec& spec);
  void choose_samples();
  int64_t local_bytes(const LayoutNode& x, size_t sample) const;
  int64_t most_local_bytes(const LayoutNode& x) const;

  const Spec& from_;
  const Spec& to_;
  c10::DimVector mesh_shape_;
  LayoutNode start_;
  Dims tensor_dims_;  // by axis
  int64_t rest_ = 1;  // elements along tensor dims that are no axis, times their size in bytes
  std::vector<DimShards> target_shards_;          // by axis
  std::vector<std::vector<Sharding>> shardings_;  // by axis; the first is that of the target
  std::vector<c10::DimVector> samples_;           // coordinates of ranks
  bool all_sampled_ = false;
  uint64_t to_reduce_ = 0;      // partial mesh dims of the source that the target has otherwise
  bool makes_partial_ = false;  // the target has partial values that the source has not
};

}  // namespace tessera
