#pragma once

#include <tessera/rules/rule.h>

#include <optional>

namespace tessera::rules {

/// x[mask], and x[mask] = values, with masks among the indices. Nothing if there is none.
std::optional<Proposal> masked_index(const Call& call);
std::optional<Proposal> masked_index_put(const Call& call);

}  // namespace tessera::rules
