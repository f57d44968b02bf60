#pragma once

#include <tessera/export.h>
#include <tessera/lru_cache.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include <c10/util/SmallVector.h>

namespace tessera {

/// How the calling thread's cache of operator plans does.
TESSERA_API CacheStatistics dispatch_cache_statistics();
/// How many plans a thread keeps at the most; then the one not used for longest goes.
TESSERA_API void set_dispatch_cache_capacity(size_t capacity);

/// How many calls of each operator the process has computed on replicas, for want of a rule that applies. All
/// threads' calls; operators without any are not there.
TESSERA_API std::map<std::string, uint64_t> fallback_counts();
/// How many results of each operator had to be copied, as its kernel laid them out in memory otherwise than
/// the rule says.
TESSERA_API std::map<std::string, uint64_t> layout_copy_counts();

/// What tells calls apart that need different plans.
using CacheKey = c10::SmallVector<uint64_t, 14>;

struct CacheKeyHash {
  size_t operator()(const CacheKey& key) const {
    uint64_t hash = key.size();
    for (const uint64_t word : key) hash = (hash ^ word) * 0x9e3779b97f4a7c15ull + (hash >> 29);
    return hash;
  }
};

template <class Value>
using LeastRecentlyUsed = LruCache<CacheKey, Value, CacheKeyHash>;

}  // namespace tessera
