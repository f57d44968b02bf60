#pragma once

#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/lru_cache.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tessera {

struct CallKeyHash {
  size_t operator()(const CallKey& key) const {
    uint64_t hash = key.size();
    for (const uint64_t word : key) hash = (hash ^ word) * 0x9e3779b97f4a7c15ull + (hash >> 29);
    return hash;
  }
};

using OpPlanCache = LruCache<CallKey, std::shared_ptr<OpPlan>, CallKeyHash>;

/// The calling thread's op plans. Empty again whenever a rule was registered.
OpPlanCache& op_plan_cache();

}  // namespace tessera
