#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>

/// How much memory the tensors of a rank need.
namespace tessera::support {

/// While alive, counts the bytes that the calling thread allocates for tensors on the CPU: those that are there
/// now, and the most that were there at once. What was allocated before does not count, nor does its end.
class PeakMemory {
 public:
  PeakMemory() : outer_(counts()) {
    static CountingAllocator allocator(c10::GetAllocator(c10::kCPU));
    c10::SetAllocator(c10::kCPU, &allocator, /*priority=*/100);
    counts() = std::make_shared<Counts>();
    mine_ = counts();
  }
  ~PeakMemory() { counts() = outer_; }
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  int64_t now() const { return mine_->now; }
  int64_t peak() const { return mine_->peak; }
  /// The peak is what is there now.
  void reset_peak() { mine_->peak = mine_->now.load(); }

 private:
  struct Counts {
    std::atomic<int64_t> now{0}, peak{0};  // another thread may free what this one has allocated
  };
  static std::shared_ptr<Counts>& counts() {
    thread_local std::shared_ptr<Counts> current;
    return current;
  }

  /// What a block needs to be freed and counted.
  struct Block {
    c10::DataPtr data;
    std::shared_ptr<Counts> counts;
    int64_t bytes;
  };

  class CountingAllocator final : public c10::Allocator {
   public:
    explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}
    c10::DataPtr allocate(size_t bytes) override {
      c10::DataPtr data = inner_->allocate(bytes);
      if (!counts()) return data;
      void* address = data.get();
      const c10::Device device = data.device();
      auto block = std::make_unique<Block>(Block{std::move(data), counts(), static_cast<int64_t>(bytes)});
      Counts& now = *block->counts;
      const int64_t total = now.now += block->bytes;
      if (total > now.peak) now.peak = total;
      return {address, block.release(), &free_block, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, size_t bytes) const override {
      default_copy_data(to, from, bytes);
    }

   private:
    static void free_block(void* context) {
      const std::unique_ptr<Block> block(static_cast<Block*>(context));
      block->counts->now -= block->bytes;
    }
    c10::Allocator* inner_;
  };

  std::shared_ptr<Counts> outer_, mine_;
};

}  // namespace tessera::support
