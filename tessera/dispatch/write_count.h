#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace tessera {

/// How often memory that several tensors may share was written to, since it was first asked or shared. Safe
/// to ask and to share from several threads at once.
class WriteCount {
 public:
  WriteCount() = default;
  ~WriteCount() { release(shared_.load(std::memory_order_relaxed)); }
  WriteCount(const WriteCount&) = delete;
  WriteCount& operator=(const WriteCount&) = delete;

  uint64_t value() const { return shared().writes.load(std::memory_order_relaxed); }
  /// Nobody may have asked yet: then there is nothing to count for.
  void bump() const {
    if (Shared* known = shared_.load(std::memory_order_acquire))
      known->writes.fetch_add(1, std::memory_order_relaxed);
  }
  /// From now on one count with `other`.
  void share(const WriteCount& other) {
    Shared& theirs = other.shared();
    theirs.owners.fetch_add(1, std::memory_order_relaxed);
    release(shared_.exchange(&theirs, std::memory_order_acq_rel));
  }

 private:
  struct Shared {
    std::atomic<uint32_t> owners{1};
    std::atomic<uint64_t> writes{0};
  };

  Shared& shared() const {
    Shared* known = shared_.load(std::memory_order_acquire);
    if (known) return *known;
    auto* made = new Shared;
    if (shared_.compare_exchange_strong(known, made, std::memory_order_acq_rel)) return *made;
    delete made;
    return *known;
  }

  static void release(Shared* shared) {
    if (shared && shared->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete shared;
  }

  mutable std::atomic<Shared*> shared_{nullptr};
};

}  // namespace tessera
