#include <tessera/comm/blocking.h>
#include <tessera/comm/threads/group_collectives.h>
#include <tessera/comm/threads/roster.h>

#include <algorithm>
#include <utility>

#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

namespace tessera::threads {

Roster::Sleeping::Sleeping(Roster& roster, Sleep sleep) : roster_(roster), sleep_(std::move(sleep)) {
  Rank& state = roster_.ranks_[sleep_.rank];
  if (is_own_thread(state)) {
    if (const std::string reason = why_endless(); !reason.empty()) sleep_.fail(reason);
    const std::lock_guard lock(roster_.mutex_);
    state.sleep = &sleep_;
    roster_.check();
  }
  wait_.emplace(
      sleep_.rank, [this] { return text(sleep_); }, &roster_, [this] { return roster_.others(); });
}

Roster::Sleeping::~Sleeping() {
  wait_.reset();
  Rank& state = roster_.ranks_[sleep_.rank];
  const std::lock_guard lock(roster_.mutex_);
  if (state.sleep == &sleep_) state.sleep = nullptr;
}

std::string Roster::text(const Sleep& sleep) {
  const auto awaited = sleep.awaited().value_or(std::vector<int64_t>());
  std::string whom;
  for (const int64_t rank : awaited)
    whom += c10::str(whom.empty() ? "rank " : sleep.any ? " or rank " : ", rank ", rank);
  return whom.empty() ? sleep.where : c10::str(sleep.where, " for ", whom);
}

/// Those that will sleep for ever. While the mutex is held no rank that sleeps can wake up and act, so that
/// all that is asked here is true at one time; and it stays true, since only the ranks in question could
/// change it.
std::vector<bool> Roster::stuck() const {
  std::vector<bool> result(ranks_.size());
  std::vector<std::optional<std::vector<int64_t>>> awaited(ranks_.size());
  for (const size_t i : c10::irange(ranks_.size())) {
    const Rank& rank = ranks_[i];
    if (rank.sleep && rank.sleep->is_final && !rank.has_helpers) awaited[i] = rank.sleep->awaited();
    result[i] = awaited[i].has_value();
  }
  auto is_stuck = [&](int64_t rank) { return result[rank]; };
  for (bool changed = true; changed;) {
    changed = false;
    for (const size_t i : c10::irange(ranks_.size())) {
      if (!result[i]) continue;
      const auto& ranks = *awaited[i];
      result[i] = ranks_[i].sleep->any ? std::all_of(ranks.begin(), ranks.end(), is_stuck)
                                       : std::any_of(ranks.begin(), ranks.end(), is_stuck);
      changed |= !result[i];
    }
  }
  return result;
}

/// Looks for ranks that wait for each other: after some rank has gone to sleep, or ended.
void Roster::check() const {
  const std::vector<bool> ranks = stuck();
  std::string reason;
  for (const size_t i : c10::irange(ranks.size())) {
    if (ranks[i]) reason += c10::str("\n  rank ", i, " ", text(*ranks_[i].sleep));
  }
  if (reason.empty()) return;
  reason = c10::str("these ranks wait for each other, and would for ever:", reason,
                    "\nAll ranks of a group must make the same calls in the same order");
  for (const size_t i : c10::irange(ranks.size())) {
    if (ranks[i]) ranks_[i].sleep->fail(reason);
  }
}

void Roster::leave(int64_t rank) {
  const std::lock_guard lock(mutex_);
  ranks_[rank].has_left = true;
  check();
}

void Roster::forget_groups() {
  for (Rank& rank : ranks_) rank.last = nullptr;
}

std::string Roster::others() const {
  std::string text;
  const std::lock_guard lock(mutex_);
  for (const size_t i : c10::irange(ranks_.size())) {
    const Rank& rank = ranks_[i];
    if (rank.sleep) continue;
    const GroupCollectives* last = rank.last;
    text +=
        c10::str("; rank ", i, rank.has_left ? " has ended, " : " does not wait, ",
                 last ? "its last was " + last->last_of(static_cast<int64_t>(i)) : "it has not communicated");
  }
  return text;
}

}  // namespace tessera::threads
