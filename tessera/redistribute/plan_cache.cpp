#include <tessera/redistribute/plan_cache.h>

#include <functional>
#include <utility>

#include <c10/util/hash.h>

namespace tessera {

namespace {

// Specs are interned, so their addresses identify them; the plan keeps both alive as long as its entry.
using PlanKey = std::pair<const void*, const void*>;

using PlanCache = LruCache<PlanKey, std::shared_ptr<const Plan>, c10::hash<PlanKey>>;

PlanCache& cache() {
  thread_local PlanCache instance(kPlanCacheCapacity);
  return instance;
}

}  // namespace

std::shared_ptr<const Plan> cached_plan(const Spec& from, const Spec& to) {
  const PlanKey key{from.id(), to.id()};
  if (const auto* known = cache().find(key)) return *known;
  return cache().insert(key, std::make_shared<const Plan>(plan(from, to)));
}

CacheStatistics plan_cache_statistics() { return cache().statistics(); }

}  // namespace tessera
