#pragma once

#include <tessera/dispatch/arguments.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/lru_cache.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tessera {

struct CallKeyHash {
  size_t operator()(const CallKey& key) const {
    uint64_t hash = key.size();
    for (const uint64_t word : key) hash = (hash ^ word) * 0x9e3779b97f4a7c15ull + (hash >> 29);
    return hash;
  }
};

/// An op plan that calls of one thread share: it stays while a call is carried out, even if calls within that one evict it.
/// Counted without atomic operations: no other thread ever has it.
class SharedOpPlan {
 public:
  SharedOpPlan() = default;
  explicit SharedOpPlan(OpPlan plan) : counted_(new Counted{std::move(plan)}) {}
  SharedOpPlan(const SharedOpPlan& other) : counted_(other.counted_) {
    if (counted_) ++counted_->owners;
  }
  SharedOpPlan(SharedOpPlan&& other) noexcept : counted_(std::exchange(other.counted_, nullptr)) {}
  SharedOpPlan& operator=(SharedOpPlan other) noexcept {
    std::swap(counted_, other.counted_);
    return *this;
  }
  ~SharedOpPlan() {
    if (counted_ && --counted_->owners == 0) delete counted_;
  }

  OpPlan& operator*() const { return counted_->plan; }
  OpPlan* operator->() const { return &counted_->plan; }

 private:
  struct Counted {
    OpPlan plan;
    size_t owners = 1;
  };
  Counted* counted_ = nullptr;
};

using OpPlanCache = LruCache<CallKey, SharedOpPlan, CallKeyHash>;

/// The calling thread's op plans. Empty again whenever a rule was registered.
OpPlanCache& op_plan_cache();

}  // namespace tessera
