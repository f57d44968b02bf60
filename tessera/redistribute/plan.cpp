#include <tessera/error.h>
#include <tessera/placement/text.h>
#include <tessera/redistribute/overlap.h>
#include <tessera/redistribute/plan.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iomanip>
#include <limits>
#include <queue>
#include <sstream>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <c10/util/hash.h>

namespace tessera {

namespace {

using Dims = c10::SmallVector<int64_t, 4>;

// After this many layouts the search ends with the best steps found so far.
constexpr int kMaxExpanded = 100;
// Up to this many ranks all are looked at while searching, above it a few.
constexpr int64_t kAllRanks = 16;
// The same for the bytes that the finished plan tells.
constexpr int64_t kAllRanksAtEnd = 64;
// The same where it seems that nothing need be communicated.
constexpr int64_t kAllRanksAtRest = 4096;

// One mesh dim's cut of a tensor dim.
struct Cut {
  int64_t mesh_dim;
  int64_t split;
  bool operator==(const Cut&) const = default;
};
using Cuts = c10::SmallVector<Cut, 4>;

Pieces cut(int64_t size, const Cuts& cuts, c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate) {
  Pieces pieces = unsharded(size);
  for (const Cut& c : cuts) {
    pieces = strided_shard(pieces, c.split, mesh_shape[c.mesh_dim], coordinate[c.mesh_dim]);
  }
  return pieces;
}

size_t common_prefix(const Cuts& a, const Cuts& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

bool has(const Cuts& cuts, int64_t mesh_dim) {
  return std::any_of(cuts.begin(), cuts.end(), [&](const Cut& c) { return c.mesh_dim == mesh_dim; });
}

// Moves to the next coordinate along `mesh_dims`; false after the last one.
bool advance(c10::DimVector& coordinate, c10::IntArrayRef mesh_shape, const Dims& mesh_dims) {
  for (const int64_t i : mesh_dims) {
    if (++coordinate[i] < mesh_shape[i]) return true;
    coordinate[i] = 0;
  }
  return false;
}

// Whether P(from) becomes P(to) by a factor on every rank. Integers cannot be divided exactly.
bool can_rescale(const Placement& from, const Placement& to, c10::ScalarType dtype) {
  if (!is_linear(from.op()) || !is_linear(to.op()) || dtype == c10::ScalarType::Bool) return false;
  return to.op() == ReduceOp::avg || c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

// What a reduction over these mesh dims is called: avg if all are, sum if only some are.
ReduceOp joint_op(const Spec& spec, const Dims& mesh_dims) {
  const ReduceOp first = spec.placement(mesh_dims[0]).op();
  for (const int64_t i : mesh_dims) {
    if (spec.placement(i).op() != first) return ReduceOp::sum;
  }
  return first;
}

std::string mesh_dim_text(const DeviceMesh& mesh, int64_t mesh_dim) {
  return mesh.mesh_dim_names().empty() ? std::to_string(mesh_dim) : mesh.mesh_dim_names()[mesh_dim];
}

std::string text(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

// A* over layouts. A layout is, for each tensor dim, the list of its cuts, and the set of mesh dims that
// still hold the partial values of the source; all other mesh dims replicate. Lists are numbered as they are
// met, and what they leave to the sampled ranks is worked out once. Slices that lead to the target are free
// and taken at once; partial values of the target are made at the very end. Mesh dims of size 1 do not exist
// here.
class Search {
 public:
  Search(const Spec& from, const Spec& to, const CostModel& costs);
  std::vector<Step> run();

 private:
  struct Line {
    Cuts cuts;
    // For each sampled rank: what it holds, how many elements these are, and how many of them it keeps.
    c10::SmallVector<Pieces, 4> pieces = {};
    Dims length = {};
    Dims kept = {};
  };

  struct State {
    uint64_t pending = 0;
    c10::SmallVector<uint16_t, 6> lines = {};
    bool operator==(const State&) const = default;
    size_t hash() const {
      size_t out = pending;
      for (const uint16_t line : lines) out = c10::hash_combine(out, line);
      return out;
    }
  };

  struct Node {
    State state;
    int parent;
    StepKind kind;
    Dims mesh_dims;
    double cost;
    int steps;
    bool done;
  };

  using Entry = std::tuple<double, int, int>;  // estimated total cost, steps so far, node

  int64_t ranks(int64_t mesh_dim) const { return mesh_shape_[mesh_dim]; }
  bool exists(int64_t mesh_dim) const { return ranks(mesh_dim) > 1; }
  bool is_pending(const State& x, int64_t mesh_dim) const { return x.pending >> mesh_dim & 1; }
  const Placement& target(int64_t mesh_dim) const { return to_.placement(mesh_dim); }
  const Cuts& cuts(const State& x, size_t axis) const { return lines_[axis][x.lines[axis]].cuts; }
  /// The axis (a tensor dim that some layout cuts) of a tensor dim, which becomes one if it was none.
  size_t axis_of(int64_t tensor_dim);
  void add_axis_to_spread_along();
  std::vector<Cuts> cuts_of(const Spec& spec);
  void choose_samples();

  uint16_t line(size_t axis, const Cuts& cuts);
  Cuts wanted(const State& x, size_t axis) const;
  bool can_become_partial(int64_t mesh_dim) const;
  bool is_cut(const State& x, int64_t mesh_dim) const;
  bool is_goal(const State& x) const;
  double remaining(const State& x) const;

  int64_t held(const State& x, size_t sample) const;
  int64_t most_held(const State& x) const;
  int64_t most_received(const State& x, const State& y) const;
  std::optional<int64_t> most_received_of_all(const State& x, const State& y, int64_t limit) const;
  int64_t bytes_of(const State& x, const State& y, StepKind kind, const Dims& mesh_dims) const;

  Dims pending_dims(const State& x) const;
  void expand(int parent);
  void move_all(int parent);
  void move(int parent, const State& y);
  void reduce(int parent, const Dims& mesh_dims);
  void reduce_scatter(int parent, const Dims& mesh_dims, c10::ArrayRef<std::pair<size_t, Cut>> cuts);
  void push(int parent, State y, StepKind kind, Dims mesh_dims, bool communicates);

  std::vector<Step> steps_to(int node);
  void append_partials(const State& x, std::vector<Step>& steps) const;
  Spec spec_of(const State& x) const;

  const Spec& from_;
  const Spec& to_;
  c10::DimVector mesh_shape_;
  c10::SmallVector<LinkCost, 4> links_;
  LinkCost fastest_;

  Dims tensor_dims_;               // by axis
  int64_t rest_ = 1;               // elements along tensor dims that are no axis, times their size in bytes
  std::vector<Cuts> target_cuts_;  // by axis
  std::vector<std::vector<Line>> lines_;  // by axis, then number
  std::vector<c10::DimVector> samples_;   // coordinates of ranks
  bool all_sampled_ = false;
  uint64_t to_reduce_ = 0;      // partial mesh dims of the source that the target has otherwise
  bool makes_partial_ = false;  // the target has partial values that the source has not

  std::vector<Node> nodes_;
  std::unordered_map<size_t, int> known_;  // the node of a state, by its hash
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open_;
  int expanded_ = 0;
  int goal_ = -1;  // the cheapest node at the target so far
};

Search::Search(const Spec& from, const Spec& to, const CostModel& costs)
    : from_(from), to_(to), mesh_shape_(from.mesh().shape()), links_(costs.of(from.mesh())) {
  const auto mesh_ndim = static_cast<int64_t>(mesh_shape_.size());
  TESSERA_CHECK(mesh_ndim <= 64, "cannot plan on ", from.mesh(), ": expected at most 64 mesh dims");
  fastest_ = {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  State start;
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    if (!exists(i)) continue;
    fastest_.latency = std::min(fastest_.latency, links_[i].latency);
    fastest_.per_byte = std::min(fastest_.per_byte, links_[i].per_byte);
    const Placement& source = from.placement(i);
    if (source.is_partial()) start.pending |= uint64_t{1} << i;
    if (source == target(i)) continue;
    if (target(i).is_partial()) {
      if (source.is_partial() && can_rescale(source, target(i), from.dtype())) continue;
      makes_partial_ = true;
    }
    if (source.is_partial()) to_reduce_ |= uint64_t{1} << i;
  }
  const auto source_cuts = cuts_of(from);
  target_cuts_ = cuts_of(to);
  if (makes_partial_) add_axis_to_spread_along();
  target_cuts_.resize(tensor_dims_.size());
  lines_.resize(tensor_dims_.size());
  choose_samples();
  rest_ = static_cast<int64_t>(c10::elementSize(from.dtype()));
  for (int64_t d = 0; d < from.ndim(); ++d) {
    if (std::find(tensor_dims_.begin(), tensor_dims_.end(), d) == tensor_dims_.end())
      rest_ *= from.shape()[d];
  }
  for (size_t a = 0; a < tensor_dims_.size(); ++a) line(a, target_cuts_[a]);
  for (size_t a = 0; a < tensor_dims_.size(); ++a) {
    start.lines.push_back(line(a, a < source_cuts.size() ? source_cuts[a] : Cuts()));
  }
  nodes_.reserve(256);
  known_.emplace(start.hash(), 0);
  nodes_.push_back({std::move(start), -1, StepKind::slice, {}, 0, 0, false});
  open_.emplace(0, 0, 0);
}

size_t Search::axis_of(int64_t tensor_dim) {
  const auto found = std::find(tensor_dims_.begin(), tensor_dims_.end(), tensor_dim);
  if (found != tensor_dims_.end()) return found - tensor_dims_.begin();
  tensor_dims_.push_back(tensor_dim);
  return tensor_dims_.size() - 1;
}

// Values that become partial in the end may be spread until then: best along a long dim that nothing else
// cuts.
void Search::add_axis_to_spread_along() {
  int64_t best = -1;
  for (int64_t d = 0; d < from_.ndim(); ++d) {
    if (std::find(tensor_dims_.begin(), tensor_dims_.end(), d) != tensor_dims_.end()) continue;
    if (best < 0 || from_.shape()[d] > from_.shape()[best]) best = d;
  }
  if (best >= 0) axis_of(best);
}

std::vector<Cuts> Search::cuts_of(const Spec& spec) {
  std::vector<Cuts> out;
  for (int64_t i = 0; i < static_cast<int64_t>(mesh_shape_.size()); ++i) {
    const int64_t mesh_dim = spec.order().empty() ? i : spec.order()[i];
    const Placement& placement = spec.placement(mesh_dim);
    if (!exists(mesh_dim) || !placement.is_shard_like()) continue;
    const size_t axis = axis_of(placement.dim());
    out.resize(std::max(out.size(), tensor_dims_.size()));
    out[axis].push_back({mesh_dim, placement.split()});
  }
  return out;
}

// The first chunks are the largest and the last ones the smallest, so the busiest rank has its target at the
// first place and its source at the last, or is near that.
void Search::choose_samples() {
  Dims dims;
  int64_t count = 1;
  for (int64_t i = 0; i < static_cast<int64_t>(mesh_shape_.size()); ++i) {
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

uint16_t Search::line(size_t axis, const Cuts& cuts) {
  std::vector<Line>& known = lines_[axis];
  for (size_t i = 0; i < known.size(); ++i) {
    if (known[i].cuts == cuts) return static_cast<uint16_t>(i);
  }
  Line made{cuts};
  for (size_t k = 0; k < samples_.size(); ++k) {
    made.pieces.push_back(cut(from_.shape()[tensor_dims_[axis]], cuts, mesh_shape_, samples_[k]));
    made.length.push_back(length(made.pieces[k]));
    made.kept.push_back(known.empty() ? made.length[k] : shared_length(made.pieces[k], known[0].pieces[k]));
  }
  known.push_back(std::move(made));
  return static_cast<uint16_t>(known.size() - 1);
}

// The cuts of the target, without those that wait for a reduction, and then those that become partial values.
Cuts Search::wanted(const State& x, size_t axis) const {
  Cuts out;
  for (const Cut& c : target_cuts_[axis]) {
    if (!is_pending(x, c.mesh_dim)) out.push_back(c);
  }
  for (const Cut& c : cuts(x, axis)) {
    if (can_become_partial(c.mesh_dim)) out.push_back(c);
  }
  return out;
}

// Whether a cut becomes partial values without communication. For an average these are multiples, which
// integers may not hold.
bool Search::can_become_partial(int64_t mesh_dim) const {
  const Placement& goal = target(mesh_dim);
  return goal.is_partial() &&
         !(goal.op() == ReduceOp::avg && c10::isIntegralType(to_.dtype(), /*includeBool=*/true));
}

bool Search::is_cut(const State& x, int64_t mesh_dim) const {
  for (size_t a = 0; a < x.lines.size(); ++a) {
    if (has(cuts(x, a), mesh_dim)) return true;
  }
  return false;
}

// Whether only partial values have to be made. Cuts that become partial may stand where the target has
// others: each rank then keeps what it needs of what it holds, and all of it is held along those mesh dims.
bool Search::is_goal(const State& x) const {
  if (x.pending & to_reduce_) return false;
  for (size_t a = 0; a < x.lines.size(); ++a) {
    const Cuts& before = cuts(x, a);
    if (before == target_cuts_[a]) continue;
    const size_t same = common_prefix(before, target_cuts_[a]);
    if (same == before.size()) return false;
    for (size_t i = same; i < before.size(); ++i) {
      if (!can_become_partial(before[i].mesh_dim)) return false;
    }
  }
  return true;
}

// Never more than the true cost. Each rank must receive what it needs and lacks, at the best pace there is.
// To reduce over n ranks takes (n-1)/n of what each holds, which is no less than if all other mesh dims cut
// the tensor; 1/n of it is then where it is needed at best.
double Search::remaining(const State& x) const {
  if (is_goal(x)) return 0;
  double most = 0;
  if (!makes_partial_) {
    for (size_t k = 0; k < samples_.size(); ++k) {
      int64_t needed = rest_, kept = rest_;
      for (size_t a = 0; a < x.lines.size(); ++a) {
        needed *= lines_[a][0].length[k];
        kept *= lines_[a][x.lines[a]].kept[k];
      }
      most = std::max(most, static_cast<double>(x.pending & to_reduce_ ? needed : needed - kept));
    }
  }
  if (x.pending & to_reduce_) {
    double least = static_cast<double>(from_.numel()) * static_cast<double>(c10::elementSize(from_.dtype()));
    double reduced = 1;
    for (int64_t i = 0; i < static_cast<int64_t>(mesh_shape_.size()); ++i) {
      const auto count = static_cast<double>(ranks(i));
      if (!is_pending(x, i)) least /= count;
      if (x.pending & to_reduce_ & uint64_t{1} << i) reduced *= count;
    }
    most = least - least / reduced + std::max(0.0, most - least / reduced);
  }
  return most == 0 ? 0 : fastest_.latency + fastest_.per_byte * most;
}

int64_t Search::held(const State& x, size_t sample) const {
  int64_t product = rest_;
  for (size_t a = 0; a < x.lines.size(); ++a) product *= lines_[a][x.lines[a]].length[sample];
  return product;
}

int64_t Search::most_held(const State& x) const {
  int64_t most = 0;
  for (size_t k = 0; k < samples_.size(); ++k) most = std::max(most, held(x, k));
  return most;
}

int64_t Search::most_received(const State& x, const State& y) const {
  int64_t most = 0;
  for (size_t k = 0; k < samples_.size(); ++k) {
    int64_t kept = rest_;
    for (size_t a = 0; a < x.lines.size(); ++a) {
      const Line& before = lines_[a][x.lines[a]];
      const Line& after = lines_[a][y.lines[a]];
      kept *= &before == &after ? after.length[k] : shared_length(before.pieces[k], after.pieces[k]);
    }
    most = std::max(most, held(y, k) - kept);
  }
  return most;
}

// The same over all ranks, unless those that matter are more than `limit`.
std::optional<int64_t> Search::most_received_of_all(const State& x, const State& y, int64_t limit) const {
  if (all_sampled_) return most_received(x, y);
  Dims dims;
  int64_t count = 1;
  int64_t rest = rest_;
  for (size_t a = 0; a < x.lines.size(); ++a) {
    if (x.lines[a] == y.lines[a]) {
      rest *= lines_[a][x.lines[a]].length[0];
      continue;
    }
    for (const Cuts* list : {&cuts(x, a), &cuts(y, a)}) {
      for (const Cut& c : *list) {
        if (std::find(dims.begin(), dims.end(), c.mesh_dim) != dims.end()) continue;
        dims.push_back(c.mesh_dim);
        count = std::min(count * ranks(c.mesh_dim), limit + 1);
      }
    }
  }
  if (count > limit) return std::nullopt;
  int64_t most = 0;
  c10::DimVector coordinate(mesh_shape_.size(), 0);
  do {
    int64_t needed = rest, kept = rest;
    for (size_t a = 0; a < x.lines.size(); ++a) {
      if (x.lines[a] == y.lines[a]) continue;
      const int64_t size = from_.shape()[tensor_dims_[a]];
      const Pieces after = cut(size, cuts(y, a), mesh_shape_, coordinate);
      needed *= length(after);
      kept *= shared_length(cut(size, cuts(x, a), mesh_shape_, coordinate), after);
    }
    most = std::max(most, needed - kept);
  } while (advance(coordinate, mesh_shape_, dims));
  return most;
}

int64_t Search::bytes_of(const State& x, const State& y, StepKind kind, const Dims& mesh_dims) const {
  int64_t count = 1;
  for (const int64_t i : mesh_dims) count *= ranks(i);
  switch (kind) {
    case StepKind::all_reduce: {
      const auto item = static_cast<int64_t>(c10::elementSize(from_.dtype()));
      const int64_t values = most_held(x) / item * 2 * (count - 1);
      return (values + count - 1) / count * item;
    }
    case StepKind::reduce_scatter:
      return most_held(y) * (count - 1);
    case StepKind::all_gather:
    case StepKind::all_to_all:
      return most_received(x, y);
    default:
      return 0;
  }
}

void Search::push(int parent, State y, StepKind kind, Dims mesh_dims, bool communicates) {
  Node made{std::move(y),         parent, kind, std::move(mesh_dims), nodes_[parent].cost,
            nodes_[parent].steps, false};
  if (communicates) {
    const LinkCost link = joint(links_, made.mesh_dims);
    const int64_t bytes = bytes_of(nodes_[parent].state, made.state, kind, made.mesh_dims);
    made.cost += link.latency + link.per_byte * static_cast<double>(bytes);
    ++made.steps;
  }
  if (expanded_ > kMaxExpanded) {
    nodes_.push_back(std::move(made));
    return;
  }
  const auto dearer = [&](const Node& other) {
    return std::tie(other.cost, other.steps) > std::tie(made.cost, made.steps);
  };
  const size_t hash = made.state.hash();
  const auto found = known_.find(hash);
  const bool known = found != known_.end() && nodes_[found->second].state == made.state;
  if (known && !dearer(nodes_[found->second])) return;
  const double estimate = made.cost + remaining(made.state);
  if (goal_ >= 0 && estimate > nodes_[goal_].cost) return;
  const int index = known ? found->second : static_cast<int>(nodes_.size());
  open_.emplace(estimate, made.steps, index);
  if (is_goal(made.state) && (goal_ < 0 || dearer(nodes_[goal_]))) goal_ = index;
  if (known) {
    nodes_[index] = std::move(made);
  } else {
    nodes_.push_back(std::move(made));
    known_.emplace(hash, index);
  }
}

// Changes cuts, with whatever collective that takes. A rank gets what it lacks from the ranks that differ
// from it in the mesh dims whose cuts are not the same, from the outermost on, before and after. Those that
// replicate before need not take part: every rank has a nearer copy.
void Search::move(int parent, const State& y) {
  const State x = nodes_[parent].state;
  if (x == y) return;
  Dims dims;
  bool only_undoes = true;
  bool one_axis = true;
  for (size_t a = 0; a < x.lines.size(); ++a) {
    const Cuts& before = cuts(x, a);
    const Cuts& after = cuts(y, a);
    const size_t same = common_prefix(before, after);
    only_undoes &= same == after.size();
    one_axis &= same == before.size() || dims.empty();
    for (size_t i = same; i < before.size(); ++i) dims.push_back(before[i].mesh_dim);
  }
  if (dims.empty() || (all_sampled_ && most_received(x, y) == 0)) {
    push(parent, y, StepKind::slice, {}, false);
    return;
  }
  if (!only_undoes || !one_axis) std::sort(dims.begin(), dims.end());
  push(parent, y, only_undoes ? StepKind::all_gather : StepKind::all_to_all, std::move(dims), true);
}

void Search::reduce(int parent, const Dims& mesh_dims) {
  if (mesh_dims.empty()) return;
  State y = nodes_[parent].state;
  for (const int64_t i : mesh_dims) y.pending &= ~(uint64_t{1} << i);
  push(parent, std::move(y), StepKind::all_reduce, mesh_dims, true);
}

void Search::reduce_scatter(int parent, const Dims& mesh_dims,
                            c10::ArrayRef<std::pair<size_t, Cut>> new_cuts) {
  if (mesh_dims.empty()) return;
  State y = nodes_[parent].state;
  for (const auto& [axis, c] : new_cuts) {
    y.pending &= ~(uint64_t{1} << c.mesh_dim);
    Cuts longer = cuts(y, axis);
    longer.push_back(c);
    y.lines[axis] = line(axis, longer);
  }
  push(parent, std::move(y), StepKind::reduce_scatter, mesh_dims, true);
}

Dims Search::pending_dims(const State& x) const {
  Dims out;
  for (int64_t i = 0; i < static_cast<int64_t>(mesh_shape_.size()); ++i) {
    if (to_reduce_ & x.pending & uint64_t{1} << i) out.push_back(i);
  }
  return out;
}

void Search::move_all(int parent) {
  State y = nodes_[parent].state;
  for (size_t a = 0; a < y.lines.size(); ++a) y.lines[a] = line(a, wanted(nodes_[parent].state, a));
  move(parent, y);
}

void Search::expand(int parent) {
  const State x = nodes_[parent].state;

  State sliced = x;
  for (size_t a = 0; a < x.lines.size(); ++a) {
    Cuts longer = cuts(x, a);
    const Cuts& goal = target_cuts_[a];
    if (common_prefix(longer, goal) != longer.size()) continue;
    while (longer.size() < goal.size()) {
      const Cut& next = goal[longer.size()];
      if (is_pending(x, next.mesh_dim) || is_cut(x, next.mesh_dim)) break;
      longer.push_back(next);
    }
    sliced.lines[a] = line(a, longer);
  }
  if (!(sliced == x)) return move(parent, sliced);

  move_all(parent);

  // Undo the cuts that are not wanted: all of them, those of one tensor dim, the innermost of one tensor dim;
  // or make it the one that is wanted of its mesh dim.
  State gathered = x;
  for (size_t a = 0; a < x.lines.size(); ++a) {
    const Cuts before = cuts(x, a);
    const size_t same = common_prefix(before, wanted(x, a));
    if (same == before.size()) continue;
    State y = x;
    gathered.lines[a] = y.lines[a] = line(a, Cuts(before.begin(), before.begin() + same));
    move(parent, y);
    y.lines[a] = line(a, Cuts(before.begin(), before.end() - 1));
    move(parent, y);
    const int64_t innermost = before.back().mesh_dim;
    for (size_t b = 0; b < x.lines.size(); ++b) {
      if (b == a || !has(target_cuts_[b], innermost)) continue;
      Cuts longer = cuts(x, b);
      longer.push_back({innermost, target(innermost).split()});
      y.lines[b] = line(b, longer);
      move(parent, y);
    }
  }
  move(parent, gathered);

  // Spread what becomes partial in the end, so that less is moved until then.
  for (size_t a = 0; a < x.lines.size(); ++a) {
    Cuts longer = cuts(x, a);
    for (int64_t i = 0; i < static_cast<int64_t>(mesh_shape_.size()); ++i) {
      if (exists(i) && can_become_partial(i) && !is_pending(x, i) && !is_cut(x, i)) longer.push_back({i, 1});
    }
    State y = x;
    y.lines[a] = line(a, longer);
    move(parent, y);
  }

  // Reduce mesh dims alone or together, onto all ranks or spread over them, as wanted or along any axis.
  const Dims pending = pending_dims(x);
  Dims pending_to_replicate;
  for (const int64_t i : pending) {
    if (!target(i).is_shard_like()) pending_to_replicate.push_back(i);
  }
  reduce(parent, pending);
  reduce(parent, pending_to_replicate);
  for (const int64_t i : pending) reduce(parent, {i});

  c10::SmallVector<std::pair<size_t, Cut>, 4> new_cuts;
  Dims dims;
  for (size_t a = 0; a < x.lines.size(); ++a) {
    for (const Cut& c : target_cuts_[a]) {
      if (!is_pending(x, c.mesh_dim)) continue;
      new_cuts.emplace_back(a, c);
      dims.push_back(c.mesh_dim);
      reduce_scatter(parent, {c.mesh_dim}, {new_cuts.back()});
    }
  }
  reduce_scatter(parent, dims, new_cuts);
  for (size_t a = 0; a < x.lines.size(); ++a) {
    new_cuts.clear();
    for (const int64_t i : pending) {
      new_cuts.emplace_back(a, Cut{i, 1});
      reduce_scatter(parent, {i}, {new_cuts.back()});
    }
    reduce_scatter(parent, pending, new_cuts);
  }
}

std::vector<Step> Search::run() {
  for (;;) {
    int index = std::get<2>(open_.top());
    open_.pop();
    if (std::exchange(nodes_[index].done, true)) continue;
    if (is_goal(nodes_[index].state)) return steps_to(index);
    if (++expanded_ <= kMaxExpanded) {
      expand(index);
      continue;
    }
    if (goal_ >= 0) return steps_to(goal_);
    for (; !is_goal(nodes_[index].state); index = static_cast<int>(nodes_.size()) - 1) {
      const Dims pending = pending_dims(nodes_[index].state);
      pending.empty() ? move_all(index) : reduce(index, pending);
    }
    return steps_to(index);
  }
}

Spec Search::spec_of(const State& x) const {
  Placements placements(mesh_shape_.size());
  ShardOrder order;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (is_pending(x, static_cast<int64_t>(i))) placements[i] = from_.placement(i);
  }
  for (size_t a = 0; a < x.lines.size(); ++a) {
    for (const Cut& c : cuts(x, a)) {
      placements[c.mesh_dim] = c.split == 1 ? Shard(tensor_dims_[a]) : StridedShard(tensor_dims_[a], c.split);
      order.push_back(c.mesh_dim);
    }
  }
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_shard_like()) order.push_back(static_cast<int64_t>(i));
  }
  return to_.with_placements(placements, order);
}

std::vector<Step> Search::steps_to(int node) {
  struct Leg {
    StepKind kind;
    Dims mesh_dims;
    const State* before;
    const State* after;
    int64_t bytes;
  };
  std::vector<int> path;
  for (int i = node; i > 0; i = nodes_[i].parent) path.push_back(i);
  std::vector<Leg> legs;
  for (size_t i = path.size(); i-- > 0;) {
    const Node& at = nodes_[path[i]];
    Leg leg{at.kind, at.mesh_dims, &nodes_[at.parent].state, &at.state, 0};
    leg.bytes = bytes_of(*leg.before, *leg.after, leg.kind, leg.mesh_dims);
    if (leg.kind == StepKind::all_gather || leg.kind == StepKind::all_to_all) {
      const int64_t limit = leg.bytes == 0 ? kAllRanksAtRest : kAllRanksAtEnd;
      const auto exact = most_received_of_all(*leg.before, *leg.after, limit);
      leg.bytes = exact.value_or(leg.bytes);
      if (exact == 0) leg.kind = StepKind::slice;
    }
    if (leg.kind == StepKind::slice && !legs.empty() && legs.back().kind == StepKind::slice) {
      legs.back().after = leg.after;
    } else {
      legs.push_back(leg);
    }
  }

  std::vector<Step> steps;
  for (Leg& leg : legs) {
    Step step{leg.kind, leg.mesh_dims, {}, {}, spec_of(*leg.after), leg.bytes, 0};
    Dims changed;
    for (size_t a = 0; a < tensor_dims_.size(); ++a) {
      if (leg.before->lines[a] == leg.after->lines[a]) continue;
      step.tensor_dims.push_back(tensor_dims_[a]);
      const size_t same = common_prefix(cuts(*leg.before, a), cuts(*leg.after, a));
      for (const Cuts* list : {&cuts(*leg.before, a), &cuts(*leg.after, a)}) {
        for (size_t i = same; i < list->size(); ++i) changed.push_back((*list)[i].mesh_dim);
      }
    }
    std::sort(step.tensor_dims.begin(), step.tensor_dims.end());
    if (leg.kind == StepKind::slice) {
      std::sort(changed.begin(), changed.end());
      changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
      step.mesh_dims = changed;
    }
    if (leg.kind == StepKind::all_reduce || leg.kind == StepKind::reduce_scatter) {
      step.op = joint_op(from_, leg.mesh_dims);
    }
    if (step.communicates()) {
      const LinkCost link = joint(links_, step.mesh_dims);
      step.seconds = link.latency + link.per_byte * static_cast<double>(step.bytes);
    }
    steps.push_back(std::move(step));
  }
  append_partials(nodes_[node].state, steps);
  if (!steps.empty()) steps.back().after = to_;
  return steps;
}

// What is left when all values are where they should be: making them partial.
void Search::append_partials(const State& x, std::vector<Step>& steps) const {
  Step made{StepKind::to_partial, {}, {}, {}, {}, 0, 0};
  Step rescaled{StepKind::rescale, {}, {}, {}, {}, 0, 0};
  Placements placements = to_.placements();
  for (int64_t i = 0; i < static_cast<int64_t>(mesh_shape_.size()); ++i) {
    if (!exists(i) || !target(i).is_partial()) continue;
    if (!is_pending(x, i)) {
      made.mesh_dims.push_back(i);
    } else if (from_.placement(i) != target(i)) {
      rescaled.mesh_dims.push_back(i);
      placements[i] = from_.placement(i);
    }
  }
  if (!made.mesh_dims.empty()) {
    for (size_t a = 0; a < tensor_dims_.size(); ++a) {
      if (cuts(x, a) != target_cuts_[a]) made.tensor_dims.push_back(tensor_dims_[a]);
    }
    std::sort(made.tensor_dims.begin(), made.tensor_dims.end());
    made.op = joint_op(to_, made.mesh_dims);
    made.after = to_.with_placements(placements, to_.order());
    steps.push_back(std::move(made));
  }
  if (!rescaled.mesh_dims.empty()) {
    rescaled.op = joint_op(to_, rescaled.mesh_dims);
    steps.push_back(std::move(rescaled));
  }
}

std::string seconds_text(double seconds) {
  if (seconds >= 1) return text(seconds, 1) + " s";
  if (seconds >= 1e-3) return text(seconds * 1e3, 1) + " ms";
  return text(seconds * 1e6, 1) + " us";
}

std::string layout_text(const Spec& spec) {
  std::string out = to_text(spec.placements());
  if (spec.order().empty()) return out;
  out += " order (";
  for (size_t i = 0; i < spec.order().size(); ++i) {
    out += (i == 0 ? "" : ", ") + mesh_dim_text(spec.mesh(), spec.order()[i]);
  }
  return out + ")";
}

std::string tensor_dims_text(const Step& step) {
  std::string out;
  for (const int64_t d : step.tensor_dims) out += (out.empty() ? "dim " : ",") + std::to_string(d);
  return out;
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return text(value, unit == 0 ? 0 : 1) + " " + kUnits[unit];
}

std::string_view name(StepKind kind) {
  constexpr std::string_view kNames[] = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all",
                                         "slice",      "to_partial", "rescale"};
  return kNames[static_cast<size_t>(kind)];
}

int64_t Plan::bytes() const {
  int64_t sum = 0;
  for (const Step& step : steps) sum += step.bytes;
  return sum;
}

double Plan::seconds() const {
  double sum = 0;
  for (const Step& step : steps) sum += step.seconds;
  return sum;
}

bool Plan::communicates() const {
  return std::any_of(steps.begin(), steps.end(), [](const Step& step) { return step.communicates(); });
}

std::ostream& operator<<(std::ostream& out, const Plan& plan) { return out << plan.str(); }

std::string Plan::str() const {
  std::ostringstream out;
  out << layout_text(from) << " -> " << layout_text(to) << "   " << to_text(to.dtype()) << to.shape()
      << " on " << to.mesh();
  // Columns: kind, mesh dims, tensor dims, bytes, cost.
  std::vector<std::array<std::string, 5>> rows;
  std::array<size_t, 5> width{};
  for (const Step& step : steps) {
    std::array<std::string, 5> row{std::string(name(step.kind)), "", tensor_dims_text(step), "local", ""};
    for (const int64_t i : step.mesh_dims)
      row[1] += c10::str(row[1].empty() ? "" : ",", mesh_dim_text(to.mesh(), i));
    if (step.communicates()) {
      row[3] = bytes_text(step.bytes) + "/rank";
      row[4] = seconds_text(step.seconds);
    }
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
    rows.push_back(std::move(row));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    std::string line = c10::str("\n  ", i + 1, ".");
    for (size_t j = 0; j < width.size(); ++j) {
      if (width[j] == 0) continue;
      const std::string pad(width[j] - rows[i][j].size(), ' ');
      line += c10::str(j == 0 ? " " : "  ", j < 3 ? rows[i][j] + pad : pad + rows[i][j]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line;
  }
  if (steps.empty()) out << "\n  nothing to do";
  return out.str();
}

Plan plan(const Spec& from, const Spec& to, const CostModel& costs) {
  TESSERA_CHECK_VALUE(from.mesh() == to.mesh(), "cannot redistribute a tensor from ", from.mesh(), " to ",
                      to.mesh(), ": both specs must have the same mesh");
  TESSERA_CHECK_VALUE(from.shape() == to.shape(), "cannot redistribute a tensor of shape ", from.shape(),
                      " to one of shape ", to.shape(), ": both specs must have the same global shape");
  TESSERA_CHECK_VALUE(from.dtype() == to.dtype(), "cannot redistribute a tensor of dtype ",
                      to_text(from.dtype()), " to dtype ", to_text(to.dtype()),
                      ": both specs must have the same dtype; convert it before or after");
  Plan out{from, to, {}};
  if (from.placements() == to.placements() && from.order() == to.order()) return out;
  if (from.numel() > 0) {
    out.steps = Search(from, to, costs).run();
    return out;
  }
  // There is nothing to be moved, but local shapes may change.
  Step step{StepKind::slice, {}, {}, {}, to, 0, 0};
  for (int64_t i = 0; i < from.mesh().ndim(); ++i) {
    if (from.placement(i) != to.placement(i)) step.mesh_dims.push_back(i);
  }
  out.steps.push_back(std::move(step));
  return out;
}

}  // namespace tessera
