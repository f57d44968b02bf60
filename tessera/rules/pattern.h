#pragma once

#include <tessera/rules/form.h>

namespace tessera::rules {

/// The first of the pattern's alternatives that fits the call; see Pattern.
std::optional<Strategies> strategies_of(const Pattern& pattern, const OpCall& call);

}  // namespace tessera::rules
