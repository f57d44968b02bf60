#pragma once

#include <tessera/dispatch/freed_memory.h>
#include <tessera/nn/shard_unit.h>
#include <tessera/placement/spec.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tessera {

/// Where the next one may begin behind so many bytes of memory that parameters share.
constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// How one parameter of a unit lies: sharded, gathered, and in the memory of the gathered ones.
struct ShardUnit::Layout {
  Spec sharded;
  Spec gathered;  // replicated along the unit's mesh dims, in the dtype of the computation
  Spec inner;     // the same on the other mesh dims only; undefined: there are none
  std::optional<Packing::Item> item;  // what the ranks share; none: it is replicated as it is
  std::optional<size_t> packed;       // which item of the unit's packing it is; none: it is not packed
  /// The ranks' shards lie one after the other in the gathered memory: gathered and reduced without a copy.
  bool is_direct() const { return item && !packed; }
  int64_t offset = 0;  // in bytes
  int64_t bytes = 0;
};

/// The gathered parameters of a unit with the values that they have now: views of one memory, which is freed
/// and filled again. When the parameters have other values there is a new one, and what autograd saved of the
/// old one cannot come back.
class ShardUnit::Gathered final : public MemoryOwner, public std::enable_shared_from_this<Gathered> {
 public:
  explicit Gathered(ShardUnit& unit);

  /// Of parameters that nobody has written since.
  bool is_current() const;
  bool is_filled() const { return buffer_.defined() && !is_freed(buffer_); }
  bool is_started() const { return arriving_.defined(); }

  /// Starts the all-gather, unless it is under way or done.
  void start();
  /// Waits for it. If backward will need them, and neighbours are to gather them then: keeps what that takes.
  void fill(bool for_backward = false);
  void free();
  /// What was kept, too.
  void forget() { kept_.reset(); }
  void restore() override;

  /// A parameter, distributed or, for local batches, as this rank sees it; without a gradient.
  const at::Tensor& tensor(size_t index, bool local);

 private:
  /// The memory becomes what has arrived.
  void take_arrived();

  const std::weak_ptr<ShardUnit> unit_;
  const std::vector<uint64_t> state_;  // of the parameters
  at::Tensor buffer_;                  // the memory, as bytes
  std::vector<at::Tensor> locals_;     // views of it
  std::array<std::vector<at::Tensor>, 2> tensors_;
  at::Tensor arriving_;            // while it is gathered: what becomes the memory
  at::Tensor message_, messages_;  // of those that are packed; undefined: there are none
  at::Tensor kept_;                // this rank's part of them, for its neighbours
  std::optional<comm::Pending> pending_;
};

}  // namespace tessera
