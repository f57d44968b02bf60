#pragma once

#include <tessera/rules/form.h>

namespace tessera::rules {

/// See IndexedDim. Where the dim of `self` is sharded, each rank must hold one contiguous range of it: what
/// is read is then partial, of bool P(any), and what is written goes to the rank that holds it. Where the
/// index is sharded, what is read is too, and the result of adding is partial.
std::optional<Strategies> strategies_of(const IndexedDim& form, const OpCall& call);

std::string text_of(const IndexedDim& form);

}  // namespace tessera::rules
