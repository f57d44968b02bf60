#include <tessera/dispatch/plan_cache.h>
#include <tessera/rules/rule.h>

#include <atomic>

namespace tessera {

namespace {

std::atomic<size_t> cache_capacity{4096};

}  // namespace

PlanCache& plan_cache() {
  // Looked up through a plain pointer: an object with a destructor would be asked each time whether it exists
  // yet.
  thread_local PlanCache* known = nullptr;
  thread_local uint64_t version = 0;
  if (!known) [[unlikely]] {
    thread_local PlanCache instance(cache_capacity);
    known = &instance;
  }
  if (version != rules::registry_version()) [[unlikely]] {
    version = rules::registry_version();
    known->clear();
  }
  return *known;
}

CacheStatistics dispatch_cache_statistics() { return plan_cache().statistics(); }

void set_dispatch_cache_capacity(size_t capacity) {
  cache_capacity = capacity;
  plan_cache().set_capacity(capacity);
}

}  // namespace tessera
