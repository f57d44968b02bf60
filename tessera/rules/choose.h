#pragma once

#include <tessera/export.h>
#include <tessera/rules/rule.h>

#include <optional>
#include <vector>

namespace tessera::rules {

/// How to carry out a call.
struct ChosenStrategy {
  std::vector<Spec> inputs;  // what each tensor must be made
  /// What each tensor that is written is then.
  std::vector<Spec> written;  // undefined of the others
  struct Output {
    DeviceMesh mesh;
    Placements placements;
    ShardOrder order;
    Result result;  // what is known of it; dims that are missing are as in what a rank computes
  };
  std::vector<Output> outputs;  // one alone is meant for all
  LocalCall local = {};
  bool has_local = false;  // on some rank, the operator with the same arguments is not what is computed
  Function decompose = {};
  /// There is more to do than to call the operator on local tensors, or to say of it.
  bool is_special() const { return has_local || decompose || local.communicates; }
};

/// The cheapest of what the operator's rule proposes for a call, mesh dim by mesh dim; what is equally cheap
/// goes to what keeps the results cut. Nothing if the rule does not apply. `returned`: of each tensor that is
/// written, the number of the result it is returned as; -1 if it is not returned.
TESSERA_API std::optional<ChosenStrategy> choose(const Rule& rule, const OpCall& call,
                                           c10::ArrayRef<int64_t> returned);

}  // namespace tessera::rules
