#pragma once

#include <tessera/rules/form.h>

namespace tessera::rules {

/// See Planes.
std::optional<Strategies> strategies_of(const Planes& form, const OpCall& call);

}  // namespace tessera::rules
