#pragma once

#include <tessera/rules/form.h>

namespace tessera::rules {

/// See DimMap and Reshape.
std::optional<Strategies> strategies_of(const DimMap& form, const OpCall& call);
std::optional<Strategies> strategies_of(const Reshape& form, const OpCall& call);

}  // namespace tessera::rules
