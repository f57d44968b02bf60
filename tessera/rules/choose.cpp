#include <tessera/error.h>
#include <tessera/redistribute/cost.h>
#include <tessera/rules/choose.h>

#include <algorithm>

#include <c10/core/MemoryFormat.h>
#include <c10/util/irange.h>

namespace tessera::rules {

namespace {

constexpr double kImpossible = 1e30;

/// Bytes of a tensor on a rank, if mesh dim `m` did not shard it.
double bytes_without(const Spec& spec, size_t m) {
  auto bytes = static_cast<double>(std::max<int64_t>(1, spec.numel())) *
               static_cast<double>(c10::elementSize(spec.dtype()));
  for (const size_t other : c10::irange(spec.placements().size())) {
    if (other != m && spec.placement(other).is_shard_like())
      bytes /= static_cast<double>(spec.mesh().shape()[other]);
  }
  return bytes;
}

/// Whether partial values become others only by a reduction. Sums and averages are multiples of each other, but
/// for integers: these are rounded, and wrap around.
bool is_reduced(const Spec& spec, const Placement& from, const Placement& to) {
  if (!from.is_partial() || !to.is_partial() || from == to) return false;
  return !is_linear(from.op()) || !is_linear(to.op()) ||
         at::isIntegralType(spec.dtype(), /*includeBool=*/true);
}

double redistribution_cost(const Spec& spec, size_t m, const Placement& from, const Placement& to,
                           const LinkCost& link) {
  return transition_cost(from, is_reduced(spec, from, to) ? Replicate() : to, spec.mesh().shape()[m],
                         bytes_without(spec, m), link);
}

/// What a strategy leaves open: how shards are strided, and which partial placement is meant.
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

/// The strategies of one call, chosen mesh dim by mesh dim.
class Chooser {
 public:
  Chooser(const OpCall& call, const Strategies& strategies, c10::ArrayRef<int64_t> returned)
      : call_(call),
        strategies_(strategies),
        returned_(returned),
        mesh_(call.tensors[0].mesh()),
        links_(CostModel().of(mesh_)),
        shards_(strategies.options.size(), 1),
        inputs_(call.tensors.size()) {
    replicated_.inputs.assign(call.tensors.size(), Replicate());
    replicated_.outputs.assign(strategies.options.empty() ? 1 : strategies.options[0].outputs.size(),
                               Replicate());
    outputs_.resize(replicated_.outputs.size());
    for (const size_t i : c10::irange(call.tensors.size())) {
      const Spec& spec = call.tensors[i];
      if (!spec.order().empty() && (order_.empty() || call.written[i])) order_ = spec.order();
    }
  }

  /// What it considers, if that is asked for.
  std::vector<ConsideredStrategy>* considered = nullptr;

  void choose_all() {
    for (const size_t m : c10::irange(mesh_.shape().size())) choose(m);
  }

  ChosenStrategy decide() {
    choose_all();
    ChosenStrategy chosen_strategy;
    for (const size_t i : c10::irange(call_.tensors.size())) {
      const Spec& spec = call_.tensors[i];
      chosen_strategy.inputs.push_back(spec.with_placements(inputs_[i], order_));
      chosen_strategy.written.emplace_back();
      if (!call_.written[i]) continue;
      chosen_strategy.written.back() =
          spec.with_placements(returned_[i] < 0 ? inputs_[i] : output(returned_[i]), order_);
    }
    const size_t count = std::max(outputs_.size(), strategies_.results.size());
    for (const size_t i : c10::irange(count)) {
      chosen_strategy.outputs.push_back({mesh_, output(i), order_, result(i)});
    }
    chosen_strategy.has_local = static_cast<bool>(strategies_.localize);
    if (strategies_.localize) chosen_strategy.local = strategies_.localize(chosen(chosen_strategy));
    return chosen_strategy;
  }

 private:
  const Placements& output(size_t index) const { return outputs_[outputs_.size() == 1 ? 0 : index]; }
  const Placement& output(const Strategy& strategy, size_t index) const {
    return strategy.outputs[strategy.outputs.size() == 1 ? 0 : index];
  }

  static Placements placed(const Placements& placements, const Variant& variant) {
    Placements result;
    for (const Placement& each : placements) result.push_back(variant(each));
    return result;
  }

  void choose(size_t m) {
    is_sharded_ = std::any_of(call_.tensors.begin(), call_.tensors.end(),
                              [&](const Spec& spec) { return spec.placement(m).is_shard_like(); });
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
    const Strategy* best = &replicated_;
    Variant best_variant;
    double lowest = kImpossible;
    size_t chosen = 0;  // among those considered
    auto consider = [&](const Strategy& strategy, const Variant& variant) {
      const double cost = cost_of(strategy, variant, m, considered ? kImpossible : lowest);
      if (considered && cost < kImpossible) {
        if (cost < lowest) chosen = considered->size();
        considered->push_back({m, placed(strategy.inputs, variant), placed(strategy.outputs, variant), cost});
      }
      if (cost >= lowest) return;
      lowest = cost;
      best = &strategy;
      best_variant = variant;
    };
    for (const size_t r : c10::irange(strategies_.options.size())) {
      const Strategy& strategy = strategies_.options[r];
      if (strategy.divisor && strategy.divisor % (shards_[r] * n) != 0) continue;
      if (strategy.mesh_dim != -1 && strategy.mesh_dim != static_cast<int64_t>(m)) continue;
      if (strategy.any_partial) {
        for (const Variant& variant : partials) consider(strategy, variant);
        continue;
      }
      consider(strategy, {});
      if (strategy.divisor || strategy.contiguous || strategy.mesh_dim != -1) continue;
      for (const Variant& variant : splits) consider(strategy, variant);
    }
    consider(replicated_, {});
    if (considered) (*considered)[chosen].chosen = true;
    for (const size_t i : c10::irange(inputs_.size())) inputs_[i].push_back(best_variant(best->inputs[i]));
    for (const size_t i : c10::irange(outputs_.size())) outputs_[i].push_back(best_variant(best->outputs[i]));
    if (best != &replicated_) shards_[best - strategies_.options.data()] *= n;
  }

  double cost_of(const Strategy& strategy, const Variant& variant, size_t m, double limit) const {
    double cost = 0;
    for (const size_t i : c10::irange(call_.tensors.size())) {
      const Placement& now = call_.tensors[i].placement(m);
      const Placement then = variant(strategy.inputs[i]);
      if (!agree(inputs_[i], then)) return kImpossible;
      // What to_local() gives after an operator must not depend on which collective is the cheapest.
      if (now.is_partial() && then.is_shard_like() && !is_sharded_) return kImpossible;
      // What is reduced is replicated, and not made partial again.
      if (is_reduced(call_.tensors[i], now, then)) return kImpossible;
      // Averages of integers are rounded: no part of one stands for itself.
      if (then.is_partial(ReduceOp::avg) && !strategy.any_partial &&
          at::isIntegralType(call_.tensors[i].dtype(), /*includeBool=*/true))
        return kImpossible;
      cost += redistribution_cost(call_.tensors[i], m, now, then, links_[m]);
      if (call_.written[i]) {
        const Placement after = returned_[i] < 0 ? then : variant(output(strategy, returned_[i]));
        cost += redistribution_cost(call_.tensors[i], m, after, now, links_[m]);
      }
      if (cost >= limit) return cost;
    }
    for (const size_t i : c10::irange(strategy.outputs.size())) {
      if (!agree(outputs_[i], variant(strategy.outputs[i]))) return kImpossible;
    }
    return cost;
  }

  /// What is known of a result: what the rule says, or what follows from its shardings.
  Result result(size_t index) const {
    if (!strategies_.results.empty()) {
      TESSERA_CHECK(index < strategies_.results.size() || strategies_.results.size() == 1,
                    call_.schema->name(), ": its sharding rule describes ", strategies_.results.size(),
                    " results, but there is one of index ", index, ".");
      return strategies_.results[strategies_.results.size() == 1 ? 0 : index];
    }
    Result known;
    for (const Strategy& strategy : strategies_.options) {
      const Placement& shard = output(strategy, index);
      if (!shard.is_shard()) continue;
      for (const size_t i : c10::irange(strategy.inputs.size())) {
        if (!strategy.inputs[i].is_shard()) continue;
        if (static_cast<int64_t>(known.shape.size()) <= shard.dim())
          known.shape.resize(shard.dim() + 1, kLocal);
        known.shape[shard.dim()] = call_.tensors[i].shape()[strategy.inputs[i].dim()];
        break;
      }
    }
    return known;
  }

  ChosenSpecs chosen(const ChosenStrategy& chosen_strategy) const {
    ChosenSpecs result{chosen_strategy.inputs, {}, order_};
    for (const auto& output : chosen_strategy.outputs) {
      result.outputs.emplace_back();
      const auto& shape = output.result.shape;
      if (strategies_.results.empty() || std::find(shape.begin(), shape.end(), kLocal) != shape.end())
        continue;
      result.outputs.back() =
          Spec(output.mesh, output.placements, shape, std::nullopt, call_.tensors[0].dtype(), output.order);
    }
    return result;
  }

  const OpCall& call_;
  const Strategies& strategies_;
  const c10::ArrayRef<int64_t> returned_;
  const DeviceMesh& mesh_;
  const c10::SmallVector<LinkCost, 4> links_;
  Strategy replicated_;
  ShardOrder order_;
  std::vector<int64_t> shards_;  // that each strategy makes so far
  bool is_sharded_ = false;      // some tensor is, on the mesh dim that is being chosen
  std::vector<Placements> inputs_, outputs_;
};

bool is_channels_last(const Spec& spec) {
  return c10::is_channels_last_strides_2d(spec.shape(), spec.strides()) ||
         c10::is_channels_last_strides_3d(spec.shape(), spec.strides());
}

/// The strides of results that the rule leaves open: channels last if an input of as many dims is.
void keep_memory_format(const OpCall& call, ChosenStrategy& chosen_strategy) {
  for (auto& [mesh, placements, order, result] : chosen_strategy.outputs) {
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

std::optional<ChosenStrategy> choose_one(const Rule& rule, const OpCall& call,
                                         c10::ArrayRef<int64_t> returned) {
  auto strategies = rule.propose(call);
  if (!strategies) return std::nullopt;
  if (strategies->decompose) {
    ChosenStrategy chosen_strategy;
    chosen_strategy.decompose = std::move(strategies->decompose);
    chosen_strategy.local.writes = strategies->writes;
    return chosen_strategy;
  }
  ChosenStrategy chosen_strategy = Chooser(call, *strategies, returned).decide();
  if (rule.keeps_memory_format) keep_memory_format(call, chosen_strategy);
  return chosen_strategy;
}

/// The i-th tensors of all lists together are one item; tensors that are not in lists are of all items, and
/// must be replicated. Only scalar tensors among these are written.
std::optional<ChosenStrategy> choose_items(const Rule& rule, const OpCall& call) {
  std::vector<std::vector<size_t>> items;
  ChosenStrategy chosen_strategy;
  chosen_strategy.inputs.resize(call.tensors.size());
  chosen_strategy.written.resize(call.tensors.size());
  for (size_t i = 0; i < call.tensors.size();) {
    const uint32_t position = call.positions[i];
    const auto& type = call.schema->arguments()[position].type();
    if (type->kind() != c10::TypeKind::ListType) {
      const Spec& shared = call.tensors[i];
      if (call.written[i] && shared.ndim() > 0) return std::nullopt;
      chosen_strategy.inputs[i] = shared.with_placements(replicated(shared.mesh()));
      if (call.written[i]) chosen_strategy.written[i] = chosen_strategy.inputs[i];
      ++i;
      continue;
    }
    size_t index = 0;
    for (; i < call.tensors.size() && call.positions[i] == position; ++i, ++index) {
      if (index == items.size()) items.emplace_back();
      items[index].push_back(i);
    }
    if (index != items.size()) return std::nullopt;  // some are plain, or lists differ in length
  }
  for (const auto& item : items) {
    OpCall part{.schema = call.schema, .arguments = call.arguments, .readable = call.readable};
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
      chosen_strategy.inputs[item[k]] = std::move(decided->inputs[k]);
      chosen_strategy.written[item[k]] = std::move(decided->written[k]);
    }
    chosen_strategy.outputs.push_back(std::move(decided->outputs.at(0)));
  }
  if (rule.together) chosen_strategy.local = rule.together(call);
  return chosen_strategy;
}

}  // namespace

std::vector<ConsideredStrategy> consider(const Rule& rule, const OpCall& call,
                                         c10::ArrayRef<int64_t> returned) {
  std::vector<ConsideredStrategy> result;
  if (rule.itemwise) return result;
  const auto strategies = rule.propose(call);
  if (!strategies || strategies->decompose) return result;
  Chooser chooser(call, *strategies, returned);
  chooser.considered = &result;
  chooser.choose_all();
  return result;
}

std::optional<ChosenStrategy> choose(const Rule& rule, const OpCall& call, c10::ArrayRef<int64_t> returned) {
  return rule.itemwise ? choose_items(rule, call) : choose_one(rule, call, returned);
}

}  // namespace tessera::rules
