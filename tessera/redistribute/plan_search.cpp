#include <tessera/redistribute/layout_space.h>
#include <tessera/redistribute/plan_search.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace tessera {

namespace {

// After this many layouts the search ends with the best steps found so far: a bound on its time on meshes of
// many dims.
constexpr int kMaxExpanded = 100;

// Where not all ranks are sampled, up to this many are looked at for the bytes of a finished plan.
constexpr int64_t kAllRanksAtEnd = 64;
// And up to this many where the sampled ones receive nothing: only if that is true of all may the step be a
// slice.
constexpr int64_t kAllRanksAtRest = 4096;

// Step::op of a reduction over these mesh dims.
ReduceOp joint_op(const Spec& spec, const Dims& mesh_dims) {
  const ReduceOp first = spec.placement(mesh_dims[0]).op();
  for (const int64_t i : mesh_dims) {
    if (spec.placement(i).op() != first) return ReduceOp::sum;
  }
  return first;
}

// A* over the layouts between two specs. Slices that lead to the target are free and taken at once; partial
// values of the target are made at the very end.
class Search : private LayoutSpace {
 public:
  Search(const Spec& from, const Spec& to, const CostModel& costs);
  std::vector<Step> run();

 private:
  struct Node {
    LayoutNode layout;
    int parent;
    StepKind kind;
    Dims mesh_dims;
    double cost;
    int steps;
    bool done;
  };

  using Entry = std::tuple<double, int, int>;  // estimated total cost, steps so far, node

  double cheapest_rest(const LayoutNode& x) const;

  void expand(int parent);
  bool slice_toward_target(int parent);
  void gather_unwanted(int parent);
  void spread_future_partials(int parent);
  void reduce_pending(int parent);
  void move_all(int parent);
  void move(int parent, const LayoutNode& y);
  void reduce(int parent, const Dims& mesh_dims);
  void reduce_scatter(int parent, const Dims& mesh_dims, c10::ArrayRef<std::pair<size_t, DimShard>> shards);
  void push(int parent, LayoutNode y, StepKind kind, Dims mesh_dims, bool communicates);

  std::vector<Step> steps_to(int node);
  void append_partials(const LayoutNode& x, std::vector<Step>& steps) const;

  c10::SmallVector<LinkCost, 4> links_;
  LinkCost fastest_;
  std::vector<Node> nodes_;
  std::unordered_map<size_t, int> known_;  // the node of a layout, by its hash
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open_;
  int expanded_ = 0;
  int goal_ = -1;  // the cheapest node at the target so far
};

Search::Search(const Spec& from, const Spec& to, const CostModel& costs)
    : LayoutSpace(from, to), links_(costs.of(from.mesh())) {
  fastest_ = {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  for (int64_t i = 0; i < mesh_ndim(); ++i) {
    if (!exists(i)) continue;
    fastest_.latency = std::min(fastest_.latency, links_[i].latency);
    fastest_.per_byte = std::min(fastest_.per_byte, links_[i].per_byte);
  }
  nodes_.reserve(256);
  known_.emplace(start().hash(), 0);
  nodes_.push_back({start(), -1, StepKind::slice, {}, 0, 0, false});
  open_.emplace(0, 0, 0);
}

// Never more than the true cost: one collective of no more than the bytes left, at the best pace there is.
double Search::cheapest_rest(const LayoutNode& x) const {
  const double bytes = fewest_bytes_left(x);
  return bytes == 0 ? 0 : fastest_.latency + fastest_.per_byte * bytes;
}

void Search::push(int parent, LayoutNode y, StepKind kind, Dims mesh_dims, bool communicates) {
  Node made{std::move(y),         parent, kind, std::move(mesh_dims), nodes_[parent].cost,
            nodes_[parent].steps, false};
  if (communicates) {
    const LinkCost link = joint(links_, made.mesh_dims);
    const int64_t bytes = bytes_of(nodes_[parent].layout, made.layout, kind, made.mesh_dims);
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
  const size_t hash = made.layout.hash();
  const auto found = known_.find(hash);
  const bool known = found != known_.end() && nodes_[found->second].layout == made.layout;
  if (known && !dearer(nodes_[found->second])) return;
  const double estimate = made.cost + cheapest_rest(made.layout);
  if (goal_ >= 0 && estimate > nodes_[goal_].cost) return;
  const int index = known ? found->second : static_cast<int>(nodes_.size());
  open_.emplace(estimate, made.steps, index);
  if (is_goal(made.layout) && (goal_ < 0 || dearer(nodes_[goal_]))) goal_ = index;
  if (known) {
    nodes_[index] = std::move(made);
  } else {
    nodes_.push_back(std::move(made));
    known_.emplace(hash, index);
  }
}

// Changes the shardings, with whatever collective that takes. A rank gets what it lacks from the ranks that
// differ from it in the mesh dims whose shards are not the same, from the outermost on, before and after.
// Those that replicate before need not take part: every rank has a nearer copy.
void Search::move(int parent, const LayoutNode& y) {
  const LayoutNode x = nodes_[parent].layout;
  if (x == y) return;
  Dims dims;
  bool only_undoes = true;
  bool one_axis = true;
  for (size_t a = 0; a < axes(); ++a) {
    const DimShards& before = shards(x, a);
    const DimShards& after = shards(y, a);
    const size_t same = common_prefix(before, after);
    only_undoes &= same == after.size();
    one_axis &= same == before.size() || dims.empty();
    for (size_t i = same; i < before.size(); ++i) dims.push_back(before[i].mesh_dim);
  }
  if (dims.empty() || (all_sampled() && most_received(x, y) == 0)) {
    push(parent, y, StepKind::slice, {}, false);
    return;
  }
  if (!only_undoes || !one_axis) std::sort(dims.begin(), dims.end());
  push(parent, y, only_undoes ? StepKind::all_gather : StepKind::all_to_all, std::move(dims), true);
}

void Search::reduce(int parent, const Dims& mesh_dims) {
  if (mesh_dims.empty()) return;
  LayoutNode y = nodes_[parent].layout;
  for (const int64_t i : mesh_dims) y.pending &= ~(uint64_t{1} << i);
  push(parent, std::move(y), StepKind::all_reduce, mesh_dims, true);
}

void Search::reduce_scatter(int parent, const Dims& mesh_dims,
                            c10::ArrayRef<std::pair<size_t, DimShard>> new_shards) {
  if (mesh_dims.empty()) return;
  LayoutNode y = nodes_[parent].layout;
  for (const auto& [axis, shard] : new_shards) {
    y.pending &= ~(uint64_t{1} << shard.mesh_dim);
    DimShards longer = shards(y, axis);
    longer.push_back(shard);
    y.shardings[axis] = sharding(axis, longer);
  }
  push(parent, std::move(y), StepKind::reduce_scatter, mesh_dims, true);
}

void Search::move_all(int parent) {
  LayoutNode y = nodes_[parent].layout;
  for (size_t a = 0; a < axes(); ++a) y.shardings[a] = sharding(a, wanted(nodes_[parent].layout, a));
  move(parent, y);
}

// Shards more, in the order of the target, as far as that needs no communication. False if nothing can be.
bool Search::slice_toward_target(int parent) {
  const LayoutNode x = nodes_[parent].layout;
  LayoutNode sliced = x;
  for (size_t a = 0; a < axes(); ++a) {
    DimShards longer = shards(x, a);
    const DimShards& goal = target_shards(a);
    if (common_prefix(longer, goal) != longer.size()) continue;
    while (longer.size() < goal.size()) {
      const DimShard& next = goal[longer.size()];
      if (is_pending(x, next.mesh_dim) || is_sharded(x, next.mesh_dim)) break;
      longer.push_back(next);
    }
    sliced.shardings[a] = sharding(a, longer);
  }
  if (sliced == x) return false;
  move(parent, sliced);
  return true;
}

// Gathers the shards that are not wanted: all of them, those of one tensor dim, the innermost of one tensor
// dim; or moves the innermost to the tensor dim that its mesh dim is to shard.
void Search::gather_unwanted(int parent) {
  const LayoutNode x = nodes_[parent].layout;
  LayoutNode gathered = x;
  for (size_t a = 0; a < axes(); ++a) {
    const DimShards before = shards(x, a);
    const size_t same = common_prefix(before, wanted(x, a));
    if (same == before.size()) continue;
    LayoutNode y = x;
    gathered.shardings[a] = y.shardings[a] = sharding(a, DimShards(before.begin(), before.begin() + same));
    move(parent, y);
    y.shardings[a] = sharding(a, DimShards(before.begin(), before.end() - 1));
    move(parent, y);
    const int64_t innermost = before.back().mesh_dim;
    for (size_t b = 0; b < axes(); ++b) {
      if (b == a || !has(target_shards(b), innermost)) continue;
      DimShards longer = shards(x, b);
      longer.push_back({innermost, target(innermost).split()});
      y.shardings[b] = sharding(b, longer);
      move(parent, y);
    }
  }
  move(parent, gathered);
}

// Shards what becomes partial in the end, so that less is moved until then.
void Search::spread_future_partials(int parent) {
  const LayoutNode x = nodes_[parent].layout;
  for (size_t a = 0; a < axes(); ++a) {
    DimShards longer = shards(x, a);
    for (int64_t i = 0; i < mesh_ndim(); ++i) {
      if (exists(i) && can_become_partial(i) && !is_pending(x, i) && !is_sharded(x, i))
        longer.push_back({i, 1});
    }
    LayoutNode y = x;
    y.shardings[a] = sharding(a, longer);
    move(parent, y);
  }
}

// Reduces mesh dims alone or together, onto all ranks or scattered over them, as the target shards or along
// any axis.
void Search::reduce_pending(int parent) {
  const LayoutNode x = nodes_[parent].layout;
  const Dims pending = pending_dims(x);
  Dims pending_to_replicate;
  for (const int64_t i : pending) {
    if (!target(i).is_shard_like()) pending_to_replicate.push_back(i);
  }
  reduce(parent, pending);
  reduce(parent, pending_to_replicate);
  for (const int64_t i : pending) reduce(parent, {i});

  c10::SmallVector<std::pair<size_t, DimShard>, 4> new_shards;
  Dims dims;
  for (size_t a = 0; a < axes(); ++a) {
    for (const DimShard& shard : target_shards(a)) {
      if (!is_pending(x, shard.mesh_dim)) continue;
      new_shards.emplace_back(a, shard);
      dims.push_back(shard.mesh_dim);
      reduce_scatter(parent, {shard.mesh_dim}, {new_shards.back()});
    }
  }
  reduce_scatter(parent, dims, new_shards);
  for (size_t a = 0; a < axes(); ++a) {
    new_shards.clear();
    for (const int64_t i : pending) {
      new_shards.emplace_back(a, DimShard{i, 1});
      reduce_scatter(parent, {i}, {new_shards.back()});
    }
    reduce_scatter(parent, pending, new_shards);
  }
}

void Search::expand(int parent) {
  if (slice_toward_target(parent)) return;
  move_all(parent);
  gather_unwanted(parent);
  spread_future_partials(parent);
  reduce_pending(parent);
}

std::vector<Step> Search::run() {
  for (;;) {
    int index = std::get<2>(open_.top());
    open_.pop();
    if (std::exchange(nodes_[index].done, true)) continue;
    if (is_goal(nodes_[index].layout)) return steps_to(index);
    if (++expanded_ <= kMaxExpanded) {
      expand(index);
      continue;
    }
    if (goal_ >= 0) return steps_to(goal_);
    for (; !is_goal(nodes_[index].layout); index = static_cast<int>(nodes_.size()) - 1) {
      const Dims pending = pending_dims(nodes_[index].layout);
      pending.empty() ? move_all(index) : reduce(index, pending);
    }
    return steps_to(index);
  }
}

std::vector<Step> Search::steps_to(int node) {
  struct Leg {
    StepKind kind;
    Dims mesh_dims;
    const LayoutNode* before;
    const LayoutNode* after;
    int64_t bytes;
  };
  std::vector<int> path;
  for (int i = node; i > 0; i = nodes_[i].parent) path.push_back(i);
  std::vector<Leg> legs;
  for (size_t i = path.size(); i-- > 0;) {
    const Node& at = nodes_[path[i]];
    Leg leg{at.kind, at.mesh_dims, &nodes_[at.parent].layout, &at.layout, 0};
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
    for (size_t a = 0; a < axes(); ++a) {
      if (leg.before->shardings[a] == leg.after->shardings[a]) continue;
      step.tensor_dims.push_back(tensor_dim(a));
      const size_t same = common_prefix(shards(*leg.before, a), shards(*leg.after, a));
      for (const DimShards* list : {&shards(*leg.before, a), &shards(*leg.after, a)}) {
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
      step.op = joint_op(from(), leg.mesh_dims);
    }
    if (step.communicates()) {
      const LinkCost link = joint(links_, step.mesh_dims);
      step.seconds = link.latency + link.per_byte * static_cast<double>(step.bytes);
    }
    steps.push_back(std::move(step));
  }
  append_partials(nodes_[node].layout, steps);
  if (!steps.empty()) steps.back().after = to();
  return steps;
}

// What is left when all values are where they should be: making them partial.
void Search::append_partials(const LayoutNode& x, std::vector<Step>& steps) const {
  Step made{StepKind::to_partial, {}, {}, {}, {}, 0, 0};
  Step rescaled{StepKind::rescale, {}, {}, {}, {}, 0, 0};
  Placements placements = to().placements();
  for (int64_t i = 0; i < mesh_ndim(); ++i) {
    if (!exists(i) || !target(i).is_partial()) continue;
    if (!is_pending(x, i)) {
      made.mesh_dims.push_back(i);
    } else if (from().placement(i) != target(i)) {
      rescaled.mesh_dims.push_back(i);
      placements[i] = from().placement(i);
    }
  }
  if (!made.mesh_dims.empty()) {
    for (size_t a = 0; a < axes(); ++a) {
      if (shards(x, a) != target_shards(a)) made.tensor_dims.push_back(tensor_dim(a));
    }
    std::sort(made.tensor_dims.begin(), made.tensor_dims.end());
    made.op = joint_op(to(), made.mesh_dims);
    made.after = to().with_placements(placements, to().order());
    steps.push_back(std::move(made));
  }
  if (!rescaled.mesh_dims.empty()) {
    rescaled.op = joint_op(to(), rescaled.mesh_dims);
    steps.push_back(std::move(rescaled));
  }
}

}  // namespace

std::vector<Step> cheapest_steps(const Spec& from, const Spec& to, const CostModel& costs) {
  return Search(from, to, costs).run();
}

}  // namespace tessera
