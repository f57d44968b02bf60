#include <tessera/error.h>
#include <tessera/redistribute/layout_space.h>
#include <tessera/redistribute/overlap.h>

#include <algorithm>

namespace tessera {

namespace {

// Up to this many ranks all are sampled; each layout looks at all of them, so they are few.
constexpr int64_t kAllRanks = 16;

// The local pieces of a dim of this size on the rank at `coordinate`.
Pieces dim_pieces(int64_t size, const DimShards& shards, c10::IntArrayRef mesh_shape,
                  c10::IntArrayRef coordinate) {
  Pieces pieces = unsharded(size);
  for (const DimShard& shard : shards) {
    pieces = strided_shard(pieces, shard.split, mesh_shape[shard.mesh_dim], coordinate[shard.mesh_dim]);
  }
  return pieces;
}

// Moves to the next coordinate along `mesh_dims`; false after the last one.
bool advance(c10::DimVector& coordinate, c10::IntArrayRef mesh_shape, const Dims& mesh_dims) {
  for (const int64_t i : mesh_dims) {
    if (++coordinate[i] < mesh_shape[i]) return true;
    coordinate[i] = 0;
  }
  return false;
}

// Whether P(from) becomes P(to) by a factor on every rank. Integers cannot be divided exactly, and their
// multiples may wrap around.
bool can_rescale(const Placement& from, const Placement& to, c10::ScalarType dtype) {
  return is_linear(from.op()) && is_linear(to.op()) && !c10::isIntegralType(dtype, /*includeBool=*/true);
}

}  // namespace

size_t common_prefix(const DimShards& a, const DimShards& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

bool has(const DimShards& shards, int64_t mesh_dim) {
  return std::any_of(shards.begin(), shards.end(),
                     [&](const DimShard& shard) { return shard.mesh_dim == mesh_dim; });
}

LayoutSpace::LayoutSpace(const Spec& from, const Spec& to)
    : from_(from), to_(to), mesh_shape_(from.mesh().shape()) {
  TESSERA_CHECK(mesh_ndim() <= 64, "cannot plan on ", from.mesh(), ": expected at most 64 mesh dims");
  for (int64_t i = 0; i < mesh_ndim(); ++i) {
    if (!exists(i)) continue;
    const Placement& source = from.placement(i);
    if (source.is_partial()) start_.pending |= uint64_t{1} << i;
    if (source == target(i)) continue;
    if (target(i).is_partial()) {
      if (source.is_partial() && can_rescale(source, target(i), from.dtype())) continue;
      makes_partial_ = true;
    }
    if (source.is_partial()) to_reduce_ |= uint64_t{1} << i;
  }
  const auto source_shards = shards_of(from);
  target_shards_ = shards_of(to);
  if (makes_partial_) add_axis_to_spread_along();
  target_shards_.resize(axes());
  shardings_.resize(axes());
  choose_samples();
  rest_ = static_cast<int64_t>(c10::elementSize(from.dtype()));
  for (int64_t d = 0; d < from.ndim(); ++d) {
    if (std::find(tensor_dims_.begin(), tensor_dims_.end(), d) == tensor_dims_.end())
      rest_ *= from.shape()[d];
  }
  for (size_t a = 0; a < axes(); ++a) sharding(a, target_shards_[a]);
  for (size_t a = 0; a < axes(); ++a) {
    start_.shardings.push_back(sharding(a, a < source_shards.size() ? source_shards[a] : DimShards()));
  }
}

size_t LayoutSpace::axis_of(int64_t tensor_dim) {
  const auto found = std::find(tensor_dims_.begin(), tensor_dims_.end(), tensor_dim);
  if (found != tensor_dims_.end()) return found - tensor_dims_.begin();
  tensor_dims_.push_back(tensor_dim);
  return tensor_dims_.size() - 1;
}

// Values that become partial in the end may be spread until then: best along a long dim that nothing else
// shards.
void LayoutSpace::add_axis_to_spread_along() {
  int64_t best = -1;
  for (int64_t d = 0; d < from_.ndim(); ++d) {
    if (std::find(tensor_dims_.begin(), tensor_dims_.end(), d) != tensor_dims_.end()) continue;
    if (best < 0 || from_.shape()[d] > from_.shape()[best]) best = d;
  }
  if (best >= 0) axis_of(best);
}

std::vector<DimShards> LayoutSpace::shards_of(const Spec& spec) {
  std::vector<DimShards> out;
  for (int64_t i = 0; i < mesh_ndim(); ++i) {
    const int64_t mesh_dim = spec.order().empty() ? i : spec.order()[i];
    const Placement& placement = spec.placement(mesh_dim);
    if (!exists(mesh_dim) || !placement.is_shard_like()) continue;
    const size_t axis = axis_of(placement.dim());
    out.resize(std::max(out.size(), tensor_dims_.size()));
    out[axis].push_back({mesh_dim, placement.split()});
  }
  return out;
}

// The first chunks are the largest and the last ones the smallest, so the busiest rank is first along the
// mesh dims of its target and last along those of its source, or near that.
void LayoutSpace::choose_samples() {
  Dims dims;
  int64_t count = 1;
  for (int64_t i = 0; i < mesh_ndim(); ++i) {
    if (!exists(i)) continue;
    dims.push_back(i);
    count = std::min(count * ranks(i), kAllRanks + 1);
  }
  all_sampled_ = count <= kAllRanks;
  c10::DimVector first(mesh_shape_.size(), 0);
  if (all_sampled_) {
    do samples_.push_back(first);
    while (advance(first, mesh_shape_, dims));
    return;
  }
  c10::DimVector second = first, last = first, far = first;
  for (const int64_t i : dims) {
    second[i] = 1;
    last[i] = ranks(i) - 1;
    far[i] = target(i).is_shard_like() ? 0 : ranks(i) - 1;
  }
  samples_ = {first, second, last, far};
}

uint16_t LayoutSpace::sharding(size_t axis, const DimShards& shards) {
  std::vector<Sharding>& known = shardings_[axis];
  for (size_t i = 0; i < known.size(); ++i) {
    if (known[i].shards == shards) return static_cast<uint16_t>(i);
  }
  Sharding made{shards};
  for (size_t k = 0; k < samples_.size(); ++k) {
    made.pieces.push_back(dim_pieces(from_.shape()[tensor_dims_[axis]], shards, mesh_shape_, samples_[k]));
    made.length.push_back(length(made.pieces[k]));
    made.kept.push_back(known.empty() ? made.length[k] : shared_length(made.pieces[k], known[0].pieces[k]));
  }
  known.push_back(std::move(made));
  return static_cast<uint16_t>(known.size() - 1);
}

DimShards LayoutSpace::wanted(const LayoutNode& x, size_t axis) const {
  DimShards out;
  for (const DimShard& shard : target_shards_[axis]) {
    if (!is_pending(x, shard.mesh_dim)) out.push_back(shard);
  }
  for (const DimShard& shard : shards(x, axis)) {
    if (can_become_partial(shard.mesh_dim)) out.push_back(shard);
  }
  return out;
}

// For an average, partial values are multiples, which integers may not be able to represent.
bool LayoutSpace::can_become_partial(int64_t mesh_dim) const {
  const Placement& goal = target(mesh_dim);
  return goal.is_partial() &&
         !(goal.op() == ReduceOp::avg && c10::isIntegralType(to_.dtype(), /*includeBool=*/true));
}

bool LayoutSpace::is_sharded(const LayoutNode& x, int64_t mesh_dim) const {
  for (size_t a = 0; a < axes(); ++a) {
    if (has(shards(x, a), mesh_dim)) return true;
  }
  return false;
}

// Mesh dims that become partial may shard where the target has
// other shards: each rank then keeps what it needs of its elements, and the ranks along those mesh dims have
// all of them.
bool LayoutSpace::is_goal(const LayoutNode& x) const {
  if (x.pending & to_reduce_) return false;
  for (size_t a = 0; a < axes(); ++a) {
    const DimShards& before = shards(x, a);
    if (before == target_shards_[a]) continue;
    const size_t same = common_prefix(before, target_shards_[a]);
    if (same == before.size()) return false;
    for (size_t i = same; i < before.size(); ++i) {
      if (!can_become_partial(before[i].mesh_dim)) return false;
    }
  }
  return true;
}

int64_t LayoutSpace::local_bytes(const LayoutNode& x, size_t sample) const {
  int64_t product = rest_;
  for (size_t a = 0; a < axes(); ++a) product *= shardings_[a][x.shardings[a]].length[sample];
  return product;
}

int64_t LayoutSpace::most_local_bytes(const LayoutNode& x) const {
  int64_t most = 0;
  for (size_t k = 0; k < samples_.size(); ++k) most = std::max(most, local_bytes(x, k));
  return most;
}

int64_t LayoutSpace::most_received(const LayoutNode& x, const LayoutNode& y) const {
  int64_t most = 0;
  for (size_t k = 0; k < samples_.size(); ++k) {
    int64_t kept = rest_;
    for (size_t a = 0; a < axes(); ++a) {
      const Sharding& before = shardings_[a][x.shardings[a]];
      const Sharding& after = shardings_[a][y.shardings[a]];
      kept *= &before == &after ? after.length[k] : shared_length(before.pieces[k], after.pieces[k]);
    }
    most = std::max(most, local_bytes(y, k) - kept);
  }
  return most;
}

std::optional<int64_t> LayoutSpace::most_received_of_all(const LayoutNode& x, const LayoutNode& y,
                                                         int64_t limit) const {
  if (all_sampled_) return most_received(x, y);
  Dims dims;
  int64_t count = 1;
  int64_t rest = rest_;
  for (size_t a = 0; a < axes(); ++a) {
    if (x.shardings[a] == y.shardings[a]) {
      rest *= shardings_[a][x.shardings[a]].length[0];
      continue;
    }
    for (const DimShards* list : {&shards(x, a), &shards(y, a)}) {
      for (const DimShard& shard : *list) {
        if (std::find(dims.begin(), dims.end(), shard.mesh_dim) != dims.end()) continue;
        dims.push_back(shard.mesh_dim);
        count = std::min(count * ranks(shard.mesh_dim), limit + 1);
      }
    }
  }
  if (count > limit) return std::nullopt;
  int64_t most = 0;
  c10::DimVector coordinate(mesh_shape_.size(), 0);
  do {
    int64_t needed = rest, kept = rest;
    for (size_t a = 0; a < axes(); ++a) {
      if (x.shardings[a] == y.shardings[a]) continue;
      const int64_t size = from_.shape()[tensor_dims_[a]];
      const Pieces after = dim_pieces(size, shards(y, a), mesh_shape_, coordinate);
      needed *= length(after);
      kept *= shared_length(dim_pieces(size, shards(x, a), mesh_shape_, coordinate), after);
    }
    most = std::max(most, needed - kept);
  } while (advance(coordinate, mesh_shape_, dims));
  return most;
}

int64_t LayoutSpace::bytes_of(const LayoutNode& x, const LayoutNode& y, StepKind kind,
                              const Dims& mesh_dims) const {
  int64_t count = 1;
  for (const int64_t i : mesh_dims) count *= ranks(i);
  switch (kind) {
    case StepKind::all_reduce: {
      const auto item = static_cast<int64_t>(c10::elementSize(from_.dtype()));
      const int64_t values = most_local_bytes(x) / item * 2 * (count - 1);
      return (values + count - 1) / count * item;
    }
    case StepKind::reduce_scatter:
      return most_local_bytes(y) * (count - 1);
    case StepKind::all_gather:
    case StepKind::all_to_all:
      return most_received(x, y);
    default:
      return 0;
  }
}

Dims LayoutSpace::pending_dims(const LayoutNode& x) const {
  Dims out;
  for (int64_t i = 0; i < mesh_ndim(); ++i) {
    if (to_reduce_ & x.pending & uint64_t{1} << i) out.push_back(i);
  }
  return out;
}

Spec LayoutSpace::spec_of(const LayoutNode& x) const {
  Placements placements = replicated(from_.mesh());
  ShardOrder order;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (is_pending(x, static_cast<int64_t>(i))) placements[i] = from_.placement(i);
  }
  for (size_t a = 0; a < axes(); ++a) {
    for (const DimShard& shard : shards(x, a)) {
      placements[shard.mesh_dim] =
          shard.split == 1 ? Shard(tensor_dims_[a]) : StridedShard(tensor_dims_[a], shard.split);
      order.push_back(shard.mesh_dim);
    }
  }
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_shard_like()) order.push_back(static_cast<int64_t>(i));
  }
  return to_.with_placements(placements, order);
}

// Each rank must receive what it needs and lacks. To reduce over n ranks takes (n-1)/n of the local tensor,
// which is no smaller than if all other mesh dims shard the tensor; 1/n of it is then where it is needed at
// best.
double LayoutSpace::fewest_bytes_left(const LayoutNode& x) const {
  if (is_goal(x)) return 0;
  double most = 0;
  if (!makes_partial_) {
    for (size_t k = 0; k < samples_.size(); ++k) {
      int64_t needed = rest_, kept = rest_;
      for (size_t a = 0; a < axes(); ++a) {
        needed *= shardings_[a][0].length[k];
        kept *= shardings_[a][x.shardings[a]].kept[k];
      }
      most = std::max(most, static_cast<double>(x.pending & to_reduce_ ? needed : needed - kept));
    }
  }
  if ((x.pending & to_reduce_) == 0) return most;
  double least = static_cast<double>(from_.numel()) * static_cast<double>(c10::elementSize(from_.dtype()));
  double reduced = 1;
  for (int64_t i = 0; i < mesh_ndim(); ++i) {
    const auto count = static_cast<double>(ranks(i));
    if (!is_pending(x, i)) least /= count;
    if (x.pending & to_reduce_ & uint64_t{1} << i) reduced *= count;
  }
  return least - least / reduced + std::max(0.0, most - least / reduced);
}

}  // namespace tessera
