#pragma once

#include <tessera/export.h>
#include <tessera/lru_cache.h>
#include <tessera/redistribute/plan.h>

#include <cstddef>
#include <memory>

namespace tessera {

/// plan(from, to) under the default costs, searched for at the first call and then taken from a cache of the
/// calling thread, which keeps the plans used last.
TESSERA_API std::shared_ptr<const Plan> cached_plan(const Spec& from, const Spec& to);

/// Of the calling thread's cache: a miss is a search.
TESSERA_API CacheStatistics plan_cache_statistics();

/// How many plans a thread keeps at most.
inline constexpr size_t kPlanCacheCapacity = 1024;

}  // namespace tessera
