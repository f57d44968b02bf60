#pragma once

#include <tessera/dispatch/cache.h>
#include <tessera/dispatch/op_plan.h>

#include <memory>

namespace tessera {

using PlanCache = LeastRecentlyUsed<std::shared_ptr<OpPlan>>;

/// The calling thread's plans. Empty again whenever a rule was registered.
PlanCache& plan_cache();

}  // namespace tessera
