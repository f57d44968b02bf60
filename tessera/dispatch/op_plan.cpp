#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/dispatch/refusal.h>
#include <tessera/dispatch/views.h>
#include <tessera/error.h>
#include <tessera/redistribute/overlap.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include <c10/util/irange.h>

namespace tessera {

namespace {

/// Of each tensor that is written, the index of the result it is returned as, or -1.
std::vector<int64_t> returned_as(const OperatorInfo& info, const rules::OpCall& call) {
  std::vector<int64_t> returned;
  for (const size_t position : call.positions) {
    const auto& results = info.returned_argument;
    const auto found = std::find(results.begin(), results.end(), static_cast<int64_t>(position));
    returned.push_back(found == results.end() || info.is_list[position] ? -1 : found - results.begin());
  }
  return returned;
}

/// Makes one plan.
class Planner {
 public:
  Planner(const OperatorInfo& info, const ResolvedRule& resolved, const rules::OpCall& call)
      : info_(info), resolved_(resolved), call_(call) {}

  OpPlan make(bool writes_plain) {
    check();
    OpPlan plan;
    plan.inputs = call_.tensors;
    auto chosen = writes_plain ? std::nullopt : choose_or_doubt(plan.in_doubt);
    if (chosen) plan.in_doubt = may_refuse(*chosen);
    if (chosen && !plan.in_doubt) {
      plan.by_rule = true;
      plan.strategy = *std::move(chosen);
      plan.is_special = plan.strategy.is_special();
      if (plan.strategy.decompose) return plan;
      plan.asks_dtypes =
          !plan.strategy.has_local && !info_.is_random && may_refuse_dtypes_elsewhere(plan.strategy.inputs);
      plan.refuses_together = sees_different_values(plan.strategy);
      consider_divisor(plan);
    } else {
      check_one_mesh();
    }
    if (info_.has_views && plan.by_rule)
      plan.offsets = view_offsets(info_.op, call_.arguments.vec(), call_.positions[0], call_.tensors[0]);
    for (const size_t i : c10::irange(plan.inputs.size())) add_route(plan, i);
    return plan;
  }

 private:
  /// What follows from the specs alone, so that it is known to be right for all calls with this key.
  void check() const {
    TESSERA_CHECK(!info_.reshapes_in_place && !info_.reallocates, info_.name,
                  ": the shape of a distributed tensor cannot be changed in place. Use "
                  "the operator that returns a new tensor, as in x = x.reshape(sizes).");
    TESSERA_CHECK(!call_.tensors.empty(), info_.name,
                  ": was dispatched to Tessera without a distributed tensor.");
    if (!resolved_.is_itemwise()) check_one_mesh();
    for (const Spec& spec : call_.tensors) {
      const DeviceMesh& mesh = spec.mesh();
      TESSERA_CHECK(mesh.is_member(), info_.name, ": rank ", mesh.get_rank(), " is not in ", mesh,
                    " of ranks ", c10::IntArrayRef(mesh.ranks()),
                    ", so it cannot compute on tensors there; ask mesh.is_member() first.");
    }
  }

  void check_one_mesh() const {
    const DeviceMesh& mesh = call_.tensors[0].mesh();
    for (const size_t i : c10::irange(call_.tensors.size())) {
      const DeviceMesh& other = call_.tensors[i].mesh();
      TESSERA_CHECK_VALUE(other == mesh, info_.name, ": argument '", info_.argument_name(call_.positions[i]),
                          "' is on ", other, " of ranks ", c10::IntArrayRef(other.ranks()), ", but '",
                          info_.argument_name(call_.positions[0]), "' is on ", mesh, " of ranks ",
                          c10::IntArrayRef(mesh.ranks()),
                          ". All distributed tensors of an operator must be on the same mesh: gather one "
                          "with full_tensor() and distribute it again.");
    }
  }

  std::optional<rules::ChosenStrategy> choose_strategy() const {
    if (!resolved_.rule) return std::nullopt;
    auto strategy = rules::choose(*resolved_.rule, call_, returned_as(info_, call_));
    // To compute otherwise and to write the result needs an operator that returns it. (With out= that has
    // been tried before: it would have to convert.)
    const bool writes = std::find(call_.written.begin(), call_.written.end(), true) != call_.written.end();
    if (strategy && (strategy->decompose || strategy->has_local) && writes && !strategy->local.writes &&
        (info_.has_out || !info_.functional()))
      return std::nullopt;
    return strategy;
  }

  /// `in_doubt`: set where a rule of ours stumbles over an argument, of which the operator itself then says
  /// what is wrong.
  std::optional<rules::ChosenStrategy> choose_or_doubt(bool& in_doubt) const {
    try {
      return choose_strategy();
    } catch (const c10::ValueError&) {
      if (resolved_.rule->family.empty()) throw;
      in_doubt = true;
      return std::nullopt;
    }
  }

  /// Whether the operator may refuse what is computed in its place. The same on all ranks.
  bool may_refuse(const rules::ChosenStrategy& strategy) const {
    const rules::Rule& rule = *resolved_.rule;
    if (rule.itemwise || !(strategy.has_local || strategy.decompose)) return false;
    std::vector<at::ScalarType> dtypes;
    for (const Spec& spec : call_.tensors) dtypes.push_back(spec.dtype());
    if (rule.may_refuse_dtypes && rule.may_refuse_dtypes(dtypes)) return true;
    const Stack all = call_.arguments.vec();
    if (info_.is_random) {
      // In the replicated fallback the random values would be others, so that doubts do not count.
      if (rule.can_be_tried && info_.generator) check_dtypes(info_.op, all);
      return false;
    }
    return may_refuse_shapes(info_.op, all) || (rule.can_be_tried && may_refuse_dtypes(info_.op, all));
  }

  /// Whether some ranks alone may see values that the operator refuses: they hold different elements of
  /// these, or some hold nothing and do not look. The same on all ranks.
  bool sees_different_values(const rules::ChosenStrategy& strategy) const {
    const auto& names = resolved_.rule->checks_values_of;
    const bool on_cpu = call_.tensors[0].mesh().device_type() == at::kCPU;
    const bool has_any = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return call_.position(name).has_value();
    });
    // Indices and sizes; but probabilities and deviations that are drawn with are no integers.
    const bool may_refuse = resolved_.rule->for_random ||
                            std::any_of(strategy.inputs.begin(), strategy.inputs.end(), [](const Spec& spec) {
                              return at::isIntegralType(spec.dtype(), /*includeBool=*/false);
                            });
    if (!has_any || !may_refuse || strategy.local.communicates || !on_cpu) return false;
    if (holds_nothing_somewhere(strategy.inputs)) return true;
    for (const size_t i : c10::irange(call_.tensors.size())) {
      if (strategy.inputs[i].is_sharded() &&
          std::find(names.begin(), names.end(), call_.name_of(i)) != names.end())
        return true;
    }
    return false;
  }

  /// Integers are refused to be divided by zero by ranks that compute something with that zero.
  void consider_divisor(OpPlan& plan) const {
    const std::string& name = resolved_.rule->divides_by;
    if (name.empty() || call_.tensors[0].mesh().device_type() != at::kCPU) return;
    const bool divides_integers =
        std::all_of(call_.tensors.begin(), call_.tensors.end(), [](const Spec& spec) {
          return spec.numel() > 0 && at::isIntegralType(spec.dtype(), /*includeBool=*/true);
        });
    if (!divides_integers) return;
    const auto index = call_.tensor(name);
    const bool all_see_it = !index || plan.strategy.inputs[*index].is_replicated();
    if (all_see_it && !holds_nothing_somewhere(plan.strategy.inputs)) return;
    plan.looks_at_divisor = all_see_it || call_.tensors[*index].is_replicated();
    plan.refuses_together = !plan.looks_at_divisor;
  }

  void add_route(OpPlan& plan, size_t index) const {
    const Spec& from = plan.inputs[index];
    plan.routes.push_back(route(from, plan.by_rule ? plan.strategy.inputs[index] : replicated(from)));
    if (!call_.written[index]) return;
    const Spec written = plan.by_rule ? plan.strategy.written[index] : replicated(from);
    // Also where it is as it was, but not in the memory it was in.
    if (written != from || !plan.routes[index].plan.steps.empty())
      plan.routes[index].back = tessera::plan(written, from);
  }

  InputRoute route(const Spec& from, const Spec& to) const {
    InputRoute result{plan(from, to)};
    const auto& steps = result.plan.steps;
    if (!resolved_.rule || !resolved_.rule->takes_slices || steps.empty() ||
        std::any_of(steps.begin(), steps.end(),
                    [](const Step& step) { return step.kind != StepKind::slice; })) {
      return result;
    }
    const auto local = from.local_pieces(), kept = to.local_pieces();
    c10::DimVector offsets;
    for (const size_t dim : c10::irange(local.size())) {
      const Pieces positions = overlap(local[dim], kept[dim]).in_a;
      if (positions.size() != 1) return result;
      offsets.push_back(positions[0].offset);
    }
    result.slice = std::move(offsets);
    return result;
  }

  const OperatorInfo& info_;
  const ResolvedRule& resolved_;
  const rules::OpCall& call_;
};

}  // namespace

OpPlan make_op_plan(const OperatorInfo& info, const ResolvedRule& resolved, const rules::OpCall& call,
                    bool writes_plain) {
  return Planner(info, resolved, call).make(writes_plain);
}

std::vector<rules::ConsideredStrategy> considered_strategies(const OperatorInfo& info,
                                                             const ResolvedRule& resolved,
                                                             const rules::OpCall& call) {
  if (!resolved.rule) return {};
  return rules::consider(*resolved.rule, call, returned_as(info, call));
}

}  // namespace tessera
