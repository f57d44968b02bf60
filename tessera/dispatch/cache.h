#pragma once

#include <tessera/export.h>
#include <tessera/lru_cache.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace tessera {

/// Of the calling thread's cache of op plans.
TESSERA_API CacheStatistics dispatch_cache_statistics();
/// How many op plans a thread keeps at most. Beyond that it evicts the one that was not used for longest.
TESSERA_API void set_dispatch_cache_capacity(size_t capacity);

/// How many calls of each operator took the replicated fallback, as no sharding rule applied. Of all threads of
/// the process; operators without any are left out.
TESSERA_API std::map<std::string, uint64_t> fallback_counts();
/// How many results of each operator had to be copied, as its kernel laid them out in memory otherwise than
/// their spec says. Counted likewise.
TESSERA_API std::map<std::string, uint64_t> layout_copy_counts();

}  // namespace tessera
