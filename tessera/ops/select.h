#pragma once

#include <tessera/rules/rule.h>

#include <optional>

namespace tessera::ops {

using namespace rules;

/// x[mask], and x[mask] = values, with masks among the indices. Nothing if there is none.
std::optional<Strategies> masked_index(const OpCall& call);
std::optional<Strategies> masked_index_put(const OpCall& call);

}  // namespace tessera::ops
