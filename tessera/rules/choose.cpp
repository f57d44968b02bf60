#include <tessera/error.h>
#include <tessera/rules/choose.h>

#include <algorithm>

#include <c10/core/MemoryFormat.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

constexpr double kImpossible = 1e30;

/// What it takes, in units of the tensor's bytes on one rank's link, to place along a mesh dim of `n` ranks
/// what is `from` as `to`. A rough price, to choose between rows; the planner of redistributions finds the
/// real way.
double price(const Placement& from, const Placement& to, int64_t n) {
  if (from == to) return 0;
  if (n == 1) return 0.001;  // nothing moves, but there is no reason either
  const auto parts = static_cast<double>(n);
  const double share = (parts - 1) / parts;
  if (from.is_replicate()) return to.is_partial() ? 0.02 : 0.01;  // a slice: no communication, but some work
  if (from.is_partial()) return to.is_replicate() ? 2 * share : to.is_partial() ? 2 * share : share;
  // A shard as a partial sum moves nothing now, but each rank has to hold, and later to reduce, all of it.
  return to.is_shard_like() ? share / parts : share;
}

double bytes_of(const Spec& spec) {
  return static_cast<double>(std::max<int64_t>(1, spec.numel())) *
         static_cast<double>(c10::elementSize(spec.dtype()));
}

/// What a row leaves open: how cuts are strided, and which partial placement is meant.
struct Variant {
  int64_t split = 1;
  std::optional<Placement> partial = {};

  Placement operator()(const Placement& placement) const {
    if (placement.is_shard() && split > 1) return StridedShard(placement.dim(), split);
    return placement.is_partial() && partial ? *partial : placement;
  }
};

/// Whether a tensor may be partial so besides what it is on other mesh dims.
bool agree(const Placements& chosen, const Placement& next) {
  if (!next.is_partial()) return true;
  return std::all_of(chosen.begin(), chosen.end(), [&](const Placement& other) {
    return !other.is_partial() || other == next || (is_linear(other.op()) && is_linear(next.op()));
  });
}

/// The rows of one call, put together mesh dim by mesh dim.
class Choice {
 public:
  Choice(const Call& call, const Proposal& proposal, c10::ArrayRef<int64_t> returned)
      : call_(call),
        proposal_(proposal),
        returned_(returned),
        mesh_(call.tensors[0].mesh()),
        parts_(proposal.rows.size(), 1),
        inputs_(call.tensors.size()) {
    whole_.inputs.assign(call.tensors.size(), Replicate());
    whole_.outputs.assign(proposal.rows.empty() ? 1 : proposal.rows[0].outputs.size(), Replicate());
    outputs_.resize(whole_.outputs.size());
    for (const size_t i : c10::irange(call.tensors.size())) {
      const Spec& spec = call.tensors[i];
      if (!spec.order().empty() && (order_.empty() || call.written[i])) order_ = spec.order();
    }
  }

  Decision decide() {
    for (const size_t m : c10::irange(mesh_.shape().size())) choose(m);
    Decision decision;
    for (const size_t i : c10::irange(call_.tensors.size())) {
      const Spec& spec = call_.tensors[i];
      decision.inputs.push_back(spec.with_placements(inputs_[i], order_));
      decision.written.emplace_back();
      if (!call_.written[i]) continue;
      decision.written.back() =
          spec.with_placements(returned_[i] < 0 ? inputs_[i] : output(returned_[i]), order_);
    }
    const size_t count = std::max(outputs_.size(), proposal_.results.size());
    for (const size_t i : c10::irange(count)) {
      decision.outputs.push_back({mesh_, output(i), order_, result(i)});
    }
    decision.has_local = static_cast<bool>(proposal_.localize);
    if (proposal_.localize) decision.local = proposal_.localize(chosen(decision));
    return decision;
  }

 private:
  const Placements& output(size_t number) const { return outputs_[outputs_.size() == 1 ? 0 : number]; }
  const Placement& output(const Row& row, size_t number) const {
    return row.outputs[row.outputs.size() == 1 ? 0 : number];
  }

  void choose(size_t m) {
    std::vector<Variant> splits, partials;
    for (const Spec& spec : call_.tensors) {
      const Placement& now = spec.placement(m);
      if (now.is_strided_shard() && std::none_of(splits.begin(), splits.end(), [&](const Variant& known) {
            return known.split == now.split();
          }))
        splits.push_back({now.split()});
      if (now.is_partial() && std::none_of(partials.begin(), partials.end(),
                                           [&](const Variant& known) { return known.partial == now; }))
        partials.push_back({1, now});
    }
    const int64_t n = mesh_.shape()[m];
    const Row* best = &whole_;
    Variant best_variant;
    double lowest = kImpossible;
    auto consider = [&](const Row& row, const Variant& variant) {
      const double cost = cost_of(row, variant, m, lowest);
      if (cost >= lowest) return;
      lowest = cost;
      best = &row;
      best_variant = variant;
    };
    for (const size_t r : c10::irange(proposal_.rows.size())) {
      const Row& row = proposal_.rows[r];
      if (row.divisor && row.divisor % (parts_[r] * n) != 0) continue;
      if (row.mesh_dim != -1 && row.mesh_dim != static_cast<int64_t>(m)) continue;
      if (row.any_partial) {
        for (const Variant& variant : partials) consider(row, variant);
        continue;
      }
      consider(row, {});
      if (row.divisor || row.ranges || row.mesh_dim != -1) continue;
      for (const Variant& variant : splits) consider(row, variant);
    }
    consider(whole_, {});
    for (const size_t i : c10::irange(inputs_.size())) inputs_[i].push_back(best_variant(best->inputs[i]));
    for (const size_t i : c10::irange(outputs_.size())) outputs_[i].push_back(best_variant(best->outputs[i]));
    if (best != &whole_) parts_[best - proposal_.rows.data()] *= n;
  }

  double cost_of(const Row& row, const Variant& variant, size_t m, double limit) const {
    const int64_t n = mesh_.shape()[m];
    double cost = 0;
    for (const size_t i : c10::irange(call_.tensors.size())) {
      const Placement& now = call_.tensors[i].placement(m);
      const Placement then = variant(row.inputs[i]);
      if (!agree(inputs_[i], then)) return kImpossible;
      // Averages of integers are rounded: no part of one stands for itself.
      if (then.is_partial(ReduceOp::avg) && !row.any_partial &&
          at::isIntegralType(call_.tensors[i].dtype(), /*includeBool=*/true))
        return kImpossible;
      cost += bytes_of(call_.tensors[i]) * price(now, then, n);
      if (call_.written[i]) {
        const Placement after = returned_[i] < 0 ? then : variant(output(row, returned_[i]));
        cost += bytes_of(call_.tensors[i]) * price(after, now, n);
      }
      if (cost >= limit) return cost;
    }
    for (const size_t i : c10::irange(row.outputs.size())) {
      if (!agree(outputs_[i], variant(row.outputs[i]))) return kImpossible;
    }
    return cost;
  }

  /// What is known of a result: what the rule says, or what its cuts tell.
  Result result(size_t number) const {
    if (!proposal_.results.empty()) {
      TESSERA_CHECK(number < proposal_.results.size() || proposal_.results.size() == 1, call_.schema->name(),
                    ": its sharding rule tells of ", proposal_.results.size(),
                    " results, but there is a number ", number, ".");
      return proposal_.results[proposal_.results.size() == 1 ? 0 : number];
    }
    Result known;
    for (const Row& row : proposal_.rows) {
      const Placement& cut = output(row, number);
      if (!cut.is_shard()) continue;
      for (const size_t i : c10::irange(row.inputs.size())) {
        if (!row.inputs[i].is_shard()) continue;
        if (static_cast<int64_t>(known.shape.size()) <= cut.dim()) known.shape.resize(cut.dim() + 1, kLocal);
        known.shape[cut.dim()] = call_.tensors[i].shape()[row.inputs[i].dim()];
        break;
      }
    }
    return known;
  }

  Chosen chosen(const Decision& decision) const {
    Chosen result{decision.inputs, {}, order_};
    for (const auto& output : decision.outputs) {
      result.outputs.emplace_back();
      const auto& shape = output.result.shape;
      if (proposal_.results.empty() || std::find(shape.begin(), shape.end(), kLocal) != shape.end()) continue;
      result.outputs.back() =
          Spec(output.mesh, output.placements, shape, std::nullopt, call_.tensors[0].dtype(), output.order);
    }
    return result;
  }

  const Call& call_;
  const Proposal& proposal_;
  const c10::ArrayRef<int64_t> returned_;
  const DeviceMesh& mesh_;
  Row whole_;
  ShardOrder order_;
  std::vector<int64_t> parts_;  // that each row makes so far
  std::vector<Placements> inputs_, outputs_;
};

bool is_channels_last(const Spec& spec) {
  return c10::is_channels_last_strides_2d(spec.shape(), spec.strides()) ||
         c10::is_channels_last_strides_3d(spec.shape(), spec.strides());
}

/// The strides of results that the rule leaves open: channels last if an input of as many dims is.
void keep_memory_format(const Call& call, Decision& decision) {
  for (auto& [mesh, placements, order, result] : decision.outputs) {
    const auto& shape = result.shape;
    const bool is_open =
        result.strides.empty() && std::find(shape.begin(), shape.end(), kLocal) == shape.end();
    const bool keeps =
        is_open && std::any_of(call.tensors.begin(), call.tensors.end(), [&](const Spec& spec) {
          return spec.ndim() == static_cast<int64_t>(shape.size()) && is_channels_last(spec);
        });
    if (!keeps) continue;
    result.strides = shape.size() == 4 ? c10::get_channels_last_strides_2d(shape)
                                       : c10::get_channels_last_strides_3d(shape);
  }
}

std::optional<Decision> choose_one(const Rule& rule, const Call& call, c10::ArrayRef<int64_t> returned) {
  auto proposal = rule.propose(call);
  if (!proposal) return std::nullopt;
  if (proposal->decompose) {
    Decision decision;
    decision.decompose = std::move(proposal->decompose);
    decision.local.writes = proposal->writes;
    return decision;
  }
  Decision decision = Choice(call, *proposal, returned).decide();
  if (rule.keeps_memory_format) keep_memory_format(call, decision);
  return decision;
}

/// The i-th tensors of all lists together are one item; tensors that are not in lists are of all items, and
/// must be replicated. Only numbers among these are written.
std::optional<Decision> choose_items(const Rule& rule, const Call& call) {
  std::vector<std::vector<size_t>> items;
  Decision decision;
  decision.inputs.resize(call.tensors.size());
  decision.written.resize(call.tensors.size());
  for (size_t i = 0; i < call.tensors.size();) {
    const uint32_t position = call.positions[i];
    const auto& type = call.schema->arguments()[position].type();
    if (type->kind() != c10::TypeKind::ListType) {
      const Spec& shared = call.tensors[i];
      if (call.written[i] && shared.ndim() > 0) return std::nullopt;
      decision.inputs[i] = shared.with_placements(replicated(shared.mesh()));
      if (call.written[i]) decision.written[i] = decision.inputs[i];
      ++i;
      continue;
    }
    size_t number = 0;
    for (; i < call.tensors.size() && call.positions[i] == position; ++i, ++number) {
      if (number == items.size()) items.emplace_back();
      items[number].push_back(i);
    }
    if (number != items.size()) return std::nullopt;  // some are plain, or lists differ in length
  }
  for (const auto& item : items) {
    Call part{.schema = call.schema, .arguments = call.arguments, .readable = call.readable};
    for (const size_t i : item) {
      part.tensors.push_back(call.tensors[i]);
      part.positions.push_back(call.positions[i]);
      part.written.push_back(call.written[i]);
      if (call.tensors[i].mesh() != call.tensors[item[0]].mesh()) return std::nullopt;
    }
    const std::vector<int64_t> returned(item.size(), -1);
    auto decided = choose_one(rule, part, returned);
    if (!decided || decided->decompose || decided->has_local) return std::nullopt;
    for (const size_t k : c10::irange(item.size())) {
      decision.inputs[item[k]] = std::move(decided->inputs[k]);
      decision.written[item[k]] = std::move(decided->written[k]);
    }
    decision.outputs.push_back(std::move(decided->outputs.at(0)));
  }
  if (rule.together) decision.local = rule.together(call);
  return decision;
}

}  // namespace

std::optional<Decision> choose(const Rule& rule, const Call& call, c10::ArrayRef<int64_t> returned) {
  return rule.itemwise ? choose_items(rule, call) : choose_one(rule, call, returned);
}

}  // namespace tessera::rules
