#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <unordered_map>
#include <utility>

namespace tessera {

struct CacheStatistics {
  uint64_t hits = 0;
  uint64_t misses = 0;
  size_t size = 0;
};

/// A bounded map that evicts the entry that was not used for longest. For one thread.
template <class Key, class Value, class Hash = std::hash<Key>>
class LruCache {
 public:
  explicit LruCache(size_t capacity) : capacity_(capacity) {}

  /// The value of a key, or null. Counts as a use.
  Value* find(const Key& key) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) {
      ++misses_;
      return nullptr;
    }
    ++hits_;
    if (found->second.position != order_.begin())
      order_.splice(order_.begin(), order_, found->second.position);
    return &found->second.value;
  }

  /// Adds a value, whose key must not be there yet. The reference is valid until the next call.
  Value& insert(const Key& key, Value value) {
    while (entries_.size() >= capacity_ && !order_.empty()) {
      entries_.erase(entries_.find(*order_.back()));
      order_.pop_back();
    }
    const auto entry = entries_.emplace(key, Entry{std::move(value), {}}).first;
    order_.push_front(&entry->first);
    entry->second.position = order_.begin();
    return entry->second.value;
  }

  void clear() {
    entries_.clear();
    order_.clear();
  }

  /// At least 1. Takes effect at the next insertion.
  void set_capacity(size_t capacity) { capacity_ = capacity > 0 ? capacity : 1; }
  CacheStatistics statistics() const { return {hits_, misses_, entries_.size()}; }

 private:
  struct Entry {
    Value value;
    typename std::list<const Key*>::iterator position;
  };

  size_t capacity_;
  std::unordered_map<Key, Entry, Hash> entries_;
  std::list<const Key*> order_;  // the latest first
  uint64_t hits_ = 0, misses_ = 0;
};

}  // namespace tessera
