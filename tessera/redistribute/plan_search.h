#pragma once

#include <tessera/placement/spec.h>
#include <tessera/redistribute/cost.h>
#include <tessera/redistribute/plan.h>

#include <vector>

namespace tessera {

/// The cheapest steps known from one layout to the other: the search behind `plan`. The specs must have the
/// same mesh, shape and dtype, at least one element, and different layouts.
std::vector<Step> cheapest_steps(const Spec& from, const Spec& to, const CostModel& costs);

}  // namespace tessera
