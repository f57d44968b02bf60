#pragma once

#include <tessera/export.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include <c10/util/SmallVector.h>

namespace tessera {

struct CacheStatistics {
  uint64_t hits = 0;
  uint64_t misses = 0;
  size_t size = 0;
};

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

/// A bounded map that forgets what was not used for longest. Not for several threads.
template <class Value>
class LeastRecentlyUsed {
 public:
  explicit LeastRecentlyUsed(size_t capacity) : capacity_(capacity) {}

  /// The value of a key, or null.
  Value* find(const CacheKey& key) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) {
      ++misses_;
      return nullptr;
    }
    ++hits_;
    if (found->second.place != order_.begin()) order_.splice(order_.begin(), order_, found->second.place);
    return &found->second.value;
  }

  /// Keeps a value, which must not be there yet. The reference is good until the next call.
  Value& insert(const CacheKey& key, Value value) {
    while (entries_.size() >= capacity_ && !order_.empty()) {
      entries_.erase(entries_.find(*order_.back()));
      order_.pop_back();
    }
    const auto entry = entries_.emplace(key, Entry{std::move(value), {}}).first;
    order_.push_front(&entry->first);
    entry->second.place = order_.begin();
    return entry->second.value;
  }

  void clear() {
    entries_.clear();
    order_.clear();
  }

  void set_capacity(size_t capacity) { capacity_ = capacity > 0 ? capacity : 1; }
  CacheStatistics statistics() const { return {hits_, misses_, entries_.size()}; }

 private:
  struct Hash {
    size_t operator()(const CacheKey& key) const {
      uint64_t hash = key.size();
      for (const uint64_t word : key) hash = (hash ^ word) * 0x9e3779b97f4a7c15ull + (hash >> 29);
      return hash;
    }
  };
  struct Entry {
    Value value;
    std::list<const CacheKey*>::iterator place;
  };

  size_t capacity_;
  std::unordered_map<CacheKey, Entry, Hash> entries_;
  std::list<const CacheKey*> order_;  // the latest first
  uint64_t hits_ = 0, misses_ = 0;
};

}  // namespace tessera
