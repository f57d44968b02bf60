#pragma once

#include <tessera/dispatch/operator_info.h>
#include <tessera/placement/spec.h>
#include <tessera/redistribute/plan.h>
#include <tessera/rules/choose.h>
#include <tessera/rules/rule.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/util/DimVector.h>

/// How an operator is carried out on distributed tensors: pure metadata. No rank is asked anything and
/// nothing is computed, so that all ranks make the same plan.
namespace tessera {

/// How an input is redistributed before the operator runs, and back after it.
struct InputRoute {
  Plan plan;
  /// If the plan only slices, and the operator takes a view with gaps: where the slice begins in the local
  /// tensor. Then a view is made instead of running the plan.
  std::optional<c10::DimVector> slice = {};
  /// Of a tensor that is written, unless it is written where it lies.
  std::optional<Plan> back = {};
};

/// How to carry out calls with one key.
struct OpPlan {
  std::vector<Spec> inputs;        // of the call: keeps them alive, as their addresses are in the key
  bool by_rule = false;            // else by the replicated fallback
  rules::ChosenStrategy strategy;  // by_rule
  bool is_special = false;         // ChosenStrategy::is_special
  bool in_doubt = false;           // fallback, as the operator may refuse arguments: not for other calls
  bool asks_dtypes = false;        // by_rule, on this rank: check_dtypes_as_first_rank
  bool refuses_together = false;   // by_rule: compute_or_refuse_together
  bool looks_at_divisor = false;   // by_rule: check_divisor
  std::vector<InputRoute> routes;  // of each input
  std::vector<Spec> outputs;       // of the last call, likely to be those of the next
  std::vector<int64_t> offsets;    // by_rule, of an operator that returns views: see view_offsets
};

/// The plan for a call. Throws if the specs alone show that it cannot be carried out. `call.arguments` may be
/// the distributed tensors themselves, or lack them; only an operator that may refuse them is asked about
/// them. `writes_plain`: plain tensors are written too, which only the replicated fallback can do.
OpPlan make_op_plan(const OperatorInfo& info, const ResolvedRule& resolved, const rules::OpCall& call,
                    bool writes_plain);

/// A call whose plan is known, before anything moves: what the span SpanKind::planned is of.
struct PlannedCall {
  const OperatorInfo& info;
  const ResolvedRule& resolved;
  const rules::OpCall& call;
  /// Lives as long as the call; its outputs are known when that ends.
  const OpPlan& plan;
};

/// What was considered for it; see rules::consider.
std::vector<rules::ConsideredStrategy> considered_strategies(const OperatorInfo& info,
                                                             const ResolvedRule& resolved,
                                                             const rules::OpCall& call);

}  // namespace tessera
