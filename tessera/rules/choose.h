#pragma once

#include <tessera/export.h>
#include <tessera/rules/rule.h>

#include <optional>
#include <vector>

namespace tessera::rules {

/// The strategies chosen for a call, on all mesh dims.
struct ChosenStrategy {
  std::vector<Spec> inputs;  // what each tensor has to be redistributed to
  /// The spec of each mutated tensor after the call; undefined for those that are only read.
  std::vector<Spec> written;
  struct Output {
    DeviceMesh mesh;
    Placements placements;
    ShardOrder order;
    Result result;  // dims that are missing are as in the local result
  };
  std::vector<Output> outputs;  // one alone is meant for all
  LocalCall local = {};
  bool has_local = false;  // some rank computes something else than the operator with the same arguments
  Function decompose = {};
  /// There is more to do than to call the operator on local tensors.
  bool is_special() const { return has_local || decompose || local.communicates; }
};

/// The cheapest of what the operator's rule proposes for a call, mesh dim by mesh dim; what is equally cheap
/// goes to what keeps the results sharded. Partial tensors become sharded only where another tensor is: else
/// what is partial and cannot stay so is replicated, as PyTorch does. Nothing if the rule does not apply.
/// `returned`: of each tensor that is written, the index of the result it is returned as; -1 if it is not
/// returned.
TESSERA_API std::optional<ChosenStrategy> choose(const Rule& rule, const OpCall& call,
                                                 c10::ArrayRef<int64_t> returned);

/// A strategy that was considered on one mesh dim: what it places how, and the price of bringing the tensors there and
/// what is written back.
struct ConsideredStrategy {
  size_t mesh_dim = 0;
  Placements inputs;
  Placements outputs;  // of each result; one alone is meant for all
  double seconds = 0;
  bool chosen = false;
};

/// What `choose` considers for such a call, mesh dim by mesh dim, in its order: of equally cheap ones it takes the first.
/// Nothing if the rule does not apply, decomposes the operator or works item by item.
TESSERA_API std::vector<ConsideredStrategy> consider(const Rule& rule, const OpCall& call,
                                                     c10::ArrayRef<int64_t> returned);

}  // namespace tessera::rules
