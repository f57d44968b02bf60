#include <tessera/comm/blocking_work.h>
#include <tessera/comm/reduction.h>
#include <tessera/comm/threads/group_collectives.h>
#include <tessera/error.h>

#include <algorithm>
#include <optional>

#include <c10/util/Exception.h>
#include <c10/util/irange.h>

namespace tessera::threads {

namespace {

/// What is carried out on the spot by whoever posts last: less than this is not worth a second core.
constexpr int64_t kInlineBytes = 32 << 10;
constexpr int64_t kChunkBytes = 128 << 10;
/// Writing more than this goes past the caches: it would not stay in them until somebody reads it.
constexpr int64_t kStreamingBytes = 32 << 20;

int64_t item_size(const Task& task) { return static_cast<int64_t>(c10::elementSize(task.dtype)); }

/// Bytes that are read or written, whichever is more: what the time depends on.
int64_t traffic(const Task& task) {
  return task.elements * item_size(task) * std::max(task.sources, task.targets);
}

int64_t chunk_elements(const Task& task) { return std::max<int64_t>(1, kChunkBytes / item_size(task)); }

}  // namespace

GroupCollectives::GroupCollectives(std::vector<int64_t> members, bool crowded, std::shared_ptr<Roster> roster)
    : members_(std::move(members)),
      complete_(static_cast<uint32_t>(members_.size()) + 1),
      roster_(std::move(roster)),
      room_(crowded),
      posted_(members_.size()),
      last_(members_.size()),
      left_(members_.size()) {
  for (Slot& slot : slots_) slot.calls.resize(members_.size());
  slot(1).arrived = 1;  // there is none before it
}

uint64_t GroupCollectives::post(int64_t member, CollectiveCall call, std::chrono::milliseconds timeout) {
  const uint64_t number = posted_[member] + 1;
  if (number > kWindow) {
    wait_until_done(member, number - kWindow, timeout, [] {
      return c10::str("a collective posted ", kWindow, " before this one and not yet done");
    });
  }
  acts(member, comm::name(call.kind));
  Slot& mine = slot(number);
  mine.calls[member] = std::move(call);
  posted_[member] = number;
  switch (arrive(mine)) {
    case Arrival::refused:
      throw_aborted(member, describe(mine.calls[member]));
    case Arrival::last:
      if (open(number)) finish(number);
      break;
    case Arrival::early:
      if (someone_left_) [[unlikely]]
        abort_if_awaiting_the_departed(number);
      break;
  }
  return number;
}

GroupCollectives::Arrival GroupCollectives::arrive(Slot& slot) const {
  uint32_t arrived = slot.arrived.load();
  do {
    if (arrived & kAborted) return Arrival::refused;
  } while (!slot.arrived.compare_exchange_weak(arrived, arrived + 1));
  return arrived + 1 == complete_ ? Arrival::last : Arrival::early;
}

bool GroupCollectives::open(uint64_t number) {
  Slot& slot = this->slot(number);
  try {
    comm::make_plan(slot.calls, members_, slot.plan);
  } catch (const c10::Error& error) {
    std::lock_guard lock(mutex_);
    failures_[number] = {comm::kind_of(std::current_exception()), error.what_without_backtrace(),
                         members_.size()};
    has_failures_ = true;
    return true;
  }
  int64_t bytes = 0, written = 0;
  for (const Task& task : slot.plan.tasks) {
    bytes += traffic(task);
    written += task.elements * item_size(task) * task.targets;
  }
  slot.streaming = written >= kStreamingBytes;
  if (bytes <= kInlineBytes) {
    for (const Task& task : slot.plan.tasks) run_task(slot, task, 0, task.elements);
    return true;
  }
  uint32_t chunks = 0;
  for (const Task& task : slot.plan.tasks) {
    slot.first_chunk.push_back(chunks);
    chunks += static_cast<uint32_t>((task.elements + chunk_elements(task) - 1) / chunk_elements(task));
  }
  slot.unfinished.store(chunks, std::memory_order_relaxed);
  slot.chunks.store(number << 32 | chunks);
  room_.wake();
  return false;
}

void GroupCollectives::finish(uint64_t number) {
  while (true) {
    Slot& slot = this->slot(number);
    for (CollectiveCall& call : slot.calls) call.tensors.clear();
    slot.first_chunk.clear();
    uint32_t arrived = complete_;
    slot.arrived.compare_exchange_strong(arrived, 0);  // unless it is aborted: then it stays as it was
    done_ = number;
    room_.wake();
    ++number;
    if (arrive(this->slot(number)) != Arrival::last || !open(number)) return;
  }
}

bool GroupCollectives::help() {
  const uint64_t number = done_ + 1;
  Slot& slot = this->slot(number);
  uint64_t chunks = slot.chunks;
  do {
    if (chunks >> 32 != (number & 0xffffffff) || (chunks & 0xffffffff) == 0) return false;
  } while (!slot.chunks.compare_exchange_weak(chunks, chunks - 1));
  run_chunk(slot, static_cast<uint32_t>((chunks & 0xffffffff) - 1));
  if (slot.unfinished.fetch_sub(1) == 1) finish(number);
  return true;
}

void GroupCollectives::run_chunk(const Slot& slot, uint32_t chunk) {
  const auto next = std::upper_bound(slot.first_chunk.begin(), slot.first_chunk.end(), chunk);
  const auto index = static_cast<size_t>(next - slot.first_chunk.begin()) - 1;
  const Task& task = slot.plan.tasks[index];
  const int64_t size = chunk_elements(task);
  const int64_t first = (chunk - slot.first_chunk[index]) * size;
  run_task(slot, task, first, std::min(size, task.elements - first));
}

void GroupCollectives::run_task(const Slot& slot, const Task& task, int64_t first, int64_t elements) {
  const CollectivePlan& plan = slot.plan;
  std::byte* const* sources = plan.pointers.data() + task.first_source;
  std::byte* const* targets = plan.pointers.data() + task.first_target;
  if (plan.op != c10d::ReduceOp::UNUSED) {
    comm::reduce_values(task.dtype, plan.op, plan.factor, sources, task.sources, targets, task.targets, first,
                        elements);
    return;
  }
  const auto offset = static_cast<size_t>(first * item_size(task));
  const auto bytes = static_cast<size_t>(elements * item_size(task));
  for (uint32_t t = 0; t < task.targets; ++t) {
    comm::copy_bytes(targets[t] + offset, sources[0] + offset, bytes, slot.streaming);
  }
}

bool GroupCollectives::poll(uint64_t number) {
  while (done_ < number) {
    if (!help()) return false;
  }
  return true;
}

bool GroupCollectives::is_lost(const Slot& slot) const {
  const uint32_t arrived = slot.arrived;
  return (arrived & kAborted) && arrived != (complete_ | kAborted);
}

void GroupCollectives::wait(int64_t member, uint64_t number, std::chrono::milliseconds timeout,
                            c10::function_ref<std::string()> what) {
  wait_until_done(member, number, timeout, what);
  if (has_failures_) [[unlikely]] {
    std::lock_guard lock(mutex_);
    const auto found = failures_.find(number);
    if (found == failures_.end()) return;
    const Failure failure = found->second;
    if (--found->second.unheard == 0) failures_.erase(found);
    has_failures_ = !failures_.empty();
    comm::throw_error(failure.kind, failure.text);
  }
}

void GroupCollectives::wait_until_done(int64_t member, uint64_t number, std::chrono::milliseconds timeout,
                                       c10::function_ref<std::string()> what) {
  bool lost = false;
  auto done = [&] {
    if (poll(number)) return true;
    lost = is_lost(slot(number)) && done_ < number;
    return lost;
  };
  std::optional<Roster::Sleeping> sleeping;
  auto stalled = [&] {
    sleeping.emplace(*roster_, Roster::Sleep{.rank = members_[member],
                                             .where = c10::str("in ", what(), ", collective ", number,
                                                               " of group ", c10::IntArrayRef(members_), ","),
                                             .awaited = [this, number] { return awaited(number); },
                                             .fail = [this](const std::string& reason) { abort(reason); }});
  };
  if (!room_.wait_for(timeout, done, stalled)) {
    abort(c10::str("rank ", members_[member], " gave up after ", timeout.count(), " ms of waiting for ",
                   missing_text(number)));
    while (!done()) std::this_thread::yield();  // it may have been opened at the last moment
  }
  if (lost) throw_aborted(member, c10::str(what(), " (collective ", number, ")"));
}

std::vector<size_t> GroupCollectives::missing(uint64_t number) const {
  std::vector<size_t> members;
  for (const size_t i : c10::irange(members_.size())) {
    if (posted_[i] < number) members.push_back(i);
  }
  return members;
}

std::optional<std::vector<int64_t>> GroupCollectives::awaited(uint64_t number) {
  if (is_lost(slot(number))) return std::nullopt;
  std::vector<int64_t> ranks;
  for (const size_t i : missing(number)) ranks.push_back(members_[i]);
  return ranks;
}

std::string GroupCollectives::missing_text(uint64_t number) const {
  std::string text;
  for (const size_t i : missing(number)) {
    text +=
        c10::str(text.empty() ? "rank " : ", rank ", members_[i], " (", posted_[i], " collectives so far)");
  }
  return text.empty() ? "an earlier collective" : text;
}

std::string GroupCollectives::last_of(int64_t rank) const {
  const auto member = std::find(members_.begin(), members_.end(), rank) - members_.begin();
  const char* last = last_[member].load(std::memory_order_relaxed);
  return c10::str(last ? last : "nothing", " after ", posted_[member], " collectives of group ",
                  c10::IntArrayRef(members_));
}

void GroupCollectives::abort(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (aborted_) return;
    reason_ = reason;
    for (Slot& slot : slots_) slot.arrived.fetch_or(kAborted);
    aborted_ = true;
  }
  room_.wake();
}

void GroupCollectives::leave(int64_t member) {
  {
    std::lock_guard lock(mutex_);
    left_[member] = true;
  }
  someone_left_ = true;
  abort_if_awaiting_the_departed(*std::max_element(posted_.begin(), posted_.end()));
  room_.wake();
}

void GroupCollectives::abort_if_awaiting_the_departed(uint64_t number) {
  for (size_t i = 0; i < members_.size(); ++i) {
    const uint64_t posted = posted_[i];
    if (posted >= number || !has_left(static_cast<int64_t>(i))) continue;
    abort(c10::str("rank ", members_[i], " has ended after ", posted,
                   " collectives of this group and takes part in no more"));
  }
}

bool GroupCollectives::has_left(int64_t member) const {
  if (!someone_left_) return false;
  std::lock_guard lock(mutex_);
  return left_[member];
}

void GroupCollectives::throw_aborted(int64_t member, const std::string& what) const {
  std::lock_guard lock(mutex_);
  throw comm::PeerError(c10::str("Rank ", members_[member], " cannot complete ", what, " of group ",
                                 c10::IntArrayRef(members_), ": ", reason_, "."));
}

}  // namespace tessera::threads
