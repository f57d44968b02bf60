#include <tessera/error.h>
#include <tessera/nn/gathered_parameters.h>
#include <tessera/nn/unit_schedule.h>

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace tessera {

bool UnitSchedule::is_in_backward_pass() { return torch::autograd::get_current_graph_task_id() != -1; }

void UnitSchedule::take_units_of(UnitSchedule& other) {
  for (const auto& unit : std::exchange(other.units_, {})) {
    if (const auto alive = unit.lock()) {
      alive->schedule_ = shared_from_this();
      units_.push_back(unit);
    }
  }
}

void UnitSchedule::begin(ShardUnit& unit) {
  const int phase = is_in_backward_pass() ? 1 : 0;
  if (phase == 1) backward();  // which ends it
  const auto last = last_.lock();
  if (last && last_phase_ != phase) last->next_[last_phase_].reset();  // it was the last one of its pass
  if (last && last.get() != &unit && last_phase_ == phase) last->next_[phase] = unit.weak_from_this();
  last_ = unit.weak_from_this();
  last_phase_ = phase;
  if (local_ || held_ > 0) return;  // plain tensors cannot be restored when they are read
  for (const auto& each : units_) {
    const auto other = each.lock();
    if (!other || other.get() == &unit || !other->is_gathered()) continue;
    bool is_around = false;
    for (auto outer = unit.outer_.lock(); outer; outer = outer->outer_.lock()) is_around |= outer == other;
    const bool may_free = phase == 1 ? other->reshard_after_backward_ : !other->keeps_after_forward();
    // One that is around is used again, unless memory counts more.
    if (may_free && (!is_around || (phase == 0 && other->options_.reshard_after_forward.value_or(false))))
      other->release();
  }
}

void UnitSchedule::prefetch_after(const ShardUnit& unit) {
  const auto waiting = prefetched_.lock();
  if (waiting && waiting.get() != &unit && waiting->gathered_ && waiting->gathered_->is_started()) return;
  prefetched_.reset();
  const auto next = unit.next_[last_phase_].lock();
  if (!next || !unit.options_.overlap || next->is_gathered()) return;
  next->start();
  prefetched_ = next;
}

void UnitSchedule::drop_prefetched() {
  const auto unit = prefetched_.lock();
  prefetched_.reset();
  if (!unit || !unit->gathered_ || !unit->gathered_->is_started()) return;
  unit->gathered_->free();
}

void UnitSchedule::enter_forward(std::optional<bool> local) {
  // Where nothing says otherwise each rank has its own batch. What is computed again in backward is as it was.
  if (depth_ == 0 && (local || !is_in_backward_pass())) local_ = local.value_or(true);
  TESSERA_CHECK_VALUE(
      !local || *local == local_, "fully_shard: the inputs of a unit are ",
      *local ? "plain tensors" : "distributed tensors", ", but those of the unit around it were ",
      local_ ? "plain" : "distributed",
      ". Give the model plain tensors, each rank its own batch, or distributed ones, of the global batch.");
  ++depth_;
}

void UnitSchedule::leave_forward() {
  if (--depth_ > 0 || is_in_backward_pass()) return;
  drop_prefetched();  // of a unit that was not used this time
  end_pass();
}

std::shared_ptr<void> UnitSchedule::backward() {
  if (!is_in_backward_pass()) return nullptr;
  if (auto known = backward_.lock()) return known;
  auto token = std::make_shared<int>(torch::autograd::get_current_graph_task_id());
  backward_ = token;
  // Of a backward that failed.
  reduction_ = {};
  reductions_.clear();
  // The callback owns the token: nothing is left of a backward that failed.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [schedule = shared_from_this(), token] { schedule->end_backward(); });
  return token;
}

void UnitSchedule::set_reduction(std::function<void()> advance, std::function<void()> wait) {
  reduction_ = std::move(advance);
  reductions_.push_back(std::move(wait));
}

void UnitSchedule::advance_reduction() {
  if (const auto advance = std::exchange(reduction_, {})) advance();
}

void UnitSchedule::finish_reductions() {
  advance_reduction();
  for (const auto& wait : std::exchange(reductions_, {})) wait();
}

void UnitSchedule::end_backward() {
  finish_reductions();
  drop_prefetched();
  for (const auto& each : units_) {
    const auto unit = each.lock();
    if (!unit) continue;
    unit->in_backward_.reset();
    if (unit->frees_after_backward()) unit->reshard();
  }
  end_pass();
  for (const auto& each : units_) {
    if (const auto unit = each.lock()) unit->reduce_kept();
  }
  finish_reductions();
}

void UnitSchedule::end_pass() {
  if (const auto last = last_.lock()) last->next_[last_phase_].reset();
  last_.reset();
}

}  // namespace tessera
