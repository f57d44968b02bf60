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

/// Of families whose kernels cannot be tried.
bool may_refuse_dtype(const OperatorInfo& info, std::string_view family, at::ScalarType dtype) {
  const auto is = [&](auto... names) { return ((family == names) || ...); };
  if (is("matmul")) return dtype == at::kBool;
  if (is("linalg"))
    return dtype != at::kFloat && dtype != at::kDouble && dtype != at::kComplexFloat &&
           dtype != at::kComplexDouble;
  if (is("interpolate") && dtype == at::kByte) return false;
  // CPUs lack some kernels of the smaller types.
  const auto is_named = [&](const char* part) { return info.name.find(part) != std::string::npos; };
  if (at::isReducedFloatingType(dtype) && (is_named("_aa") || is_named("avg_pool3d"))) return true;
  return is("convolution", "pooling", "spatial", "interpolate", "normalize", "loss", "attention") &&
         !at::isFloatingType(dtype);
}

/// Whether every rank holds as much of each dim.
bool is_even(const Spec& spec) {
  std::vector<int64_t> parts(spec.ndim(), 1);
  for (const size_t m : c10::irange(spec.placements().size())) {
    if (spec.placement(m).is_shard_like()) parts[spec.placement(m).dim()] *= spec.mesh().shape()[m];
  }
  return std::equal(parts.begin(), parts.end(), spec.shape().begin(),
                    [](int64_t count, int64_t size) { return size % count == 0; });
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
    auto chosen = writes_plain ? std::nullopt : choose_strategy();
    plan.in_doubt = chosen && may_refuse(*chosen);
    if (chosen && !plan.in_doubt) {
      plan.by_rule = true;
      plan.strategy = *std::move(chosen);
      plan.is_special = plan.strategy.is_special();
      if (plan.strategy.decompose) return plan;
    } else {
      check_one_mesh();
    }
    if (info_.has_views && plan.by_rule)
      plan.offsets = view_offsets(info_.op, call_.arguments.vec(), call_.positions[0], call_.tensors[0]);
    for (const size_t i : c10::irange(plan.inputs.size())) add_route(plan, i);
    return plan;
  }

 private:
  /// What the specs alone tell, so that it is known to be right for all calls with this key.
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
                          "with full_tensor() and distribute it anew.");
    }
  }

  std::optional<rules::ChosenStrategy> choose_strategy() const {
    if (!resolved_.rule) return std::nullopt;
    std::vector<int64_t> returned;
    for (const size_t position : call_.positions) {
      const auto& results = info_.returned_argument;
      const auto found = std::find(results.begin(), results.end(), static_cast<int64_t>(position));
      returned.push_back(found == results.end() || info_.is_list[position] ? -1 : found - results.begin());
    }
    auto strategy = rules::choose(*resolved_.rule, call_, returned);
    // To compute otherwise and to write the result needs an operator that returns it. (With out= that has
    // been tried before: it would have to convert.)
    const bool writes = std::find(call_.written.begin(), call_.written.end(), true) != call_.written.end();
    if (strategy && (strategy->decompose || strategy->has_local) && writes && !strategy->local.writes &&
        (info_.has_out || !info_.functional()))
      return std::nullopt;
    return strategy;
  }

  /// Whether the operator may refuse what a rule would accept: where something else is computed, and where
  /// some rank may have nothing to compute. The same on all ranks.
  bool may_refuse(const rules::ChosenStrategy& strategy) const {
    const rules::Rule& rule = *resolved_.rule;
    // Random numbers would be others on replicas; their rules check what they are told.
    if (rule.itemwise || info_.is_random) return false;
    const bool replaces = strategy.has_local || strategy.decompose;
    if (!replaces && std::all_of(strategy.inputs.begin(), strategy.inputs.end(), is_even)) return false;
    if (may_refuse_dtype(info_, rule.family, call_.tensors[0].dtype())) return true;
    const Stack all = call_.arguments.vec();
    return (replaces && may_refuse_shapes(info_.op, all)) ||
           (rule.can_be_tried && may_refuse_dtypes(info_.op, all));
  }

  void add_route(OpPlan& plan, size_t index) const {
    const Spec& from = plan.inputs[index];
    plan.routes.push_back(route(from, plan.by_rule ? plan.strategy.inputs[index] : replicated(from)));
    if (!call_.written[index]) return;
    const Spec written = plan.by_rule ? plan.strategy.written[index] : replicated(from);
    if (written != from) plan.routes[index].back = tessera::plan(written, from);
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

}  // namespace tessera
