#include <tessera/dispatch/cache.h>
#include <tessera/dispatch/op_plan_cache.h>
#include <tessera/rules/rule.h>
#include <tessera/thread_scope.h>

#include <atomic>

namespace tessera {

namespace {

std::atomic<size_t> cache_capacity{4096};

}  // namespace

OpPlanCache& op_plan_cache() {
  // Looked up through a plain pointer: an object with a destructor would be asked each time whether it exists
  // yet.
  thread_local OpPlanCache* known TESSERA_STATIC_TLS = nullptr;
  thread_local uint64_t version TESSERA_STATIC_TLS = 0;
  if (!known) [[unlikely]] {
    thread_local OpPlanCache instance(cache_capacity);
    known = &instance;
  }
  if (version != rules::registry_version()) [[unlikely]] {
    version = rules::registry_version();
    known->clear();
  }
  return *known;
}

CacheStatistics dispatch_cache_statistics() { return op_plan_cache().statistics(); }

void set_dispatch_cache_capacity(size_t capacity) {
  cache_capacity = capacity;
  op_plan_cache().set_capacity(capacity);
}

}  // namespace tessera
