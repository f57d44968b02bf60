#pragma once

#include <tessera/nn/shard_unit.h>

#include <functional>
#include <memory>
#include <vector>

namespace tessera {

/// The units of one model: in which order they are used, and what is under way. What it decides depends on the
/// order in which the program uses units alone, which is the same on all ranks.
class UnitSchedule : public std::enable_shared_from_this<UnitSchedule> {
 public:
  void add(const std::shared_ptr<ShardUnit>& unit) { units_.push_back(unit); }
  /// Of units that have a unit around them now.
  void take_units_of(UnitSchedule& other);

  /// Before a unit is gathered: frees those that are done with, and remembers what came after what.
  void begin(ShardUnit& unit);
  /// After it was gathered: starts to gather the one that came next before.
  void prefetch_after(const ShardUnit& unit);

  /// Forward of some unit, perhaps inside that of another, with local batches or not.
  void enter_forward(std::optional<bool> local);
  void leave_forward();
  static bool is_in_backward_pass();
  bool is_in_forward() const { return depth_ > 0; }
  bool is_local() const { return local_; }

  /// While an operator takes parameters of several units, none is freed.
  void hold(bool held) { held_ += held ? 1 : -1; }

  /// What the end of this backward ends; null outside of backward.
  std::shared_ptr<void> backward();

  /// One reduction is under way at a time, so that one unit's gradients wait to be sent: `advance` returns when they are.
  /// `wait` returns when all of it is done, which the end of backward waits for.
  void set_reduction(std::function<void()> advance, std::function<void()> wait);
  void advance_reduction();

 private:
  void end_backward();
  void finish_reductions();
  void end_pass();
  void drop_prefetched();

  std::vector<std::weak_ptr<ShardUnit>> units_;
  std::weak_ptr<ShardUnit> last_, prefetched_;
  std::weak_ptr<void> backward_;
  std::function<void()> reduction_;                // advances the one that is under way
  std::vector<std::function<void()>> reductions_;  // wait for each
  int64_t depth_ = 0, held_ = 0;
  int last_phase_ = 0;
  bool local_ = false;
};

}  // namespace tessera
