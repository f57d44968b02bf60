#include <tessera/comm/blocking_work.h>
#include <tessera/comm/shm/member.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstring>

namespace tessera::shm {

namespace {

template <size_t N>
void write_text(std::array<char, N>& target, const std::string& text) {
  const size_t size = std::min(text.size(), N - 1);
  std::memcpy(target.data(), text.data(), size);
  target[size] = '\0';
}

}  // namespace

Member::Member(const BackendRequest& request)
    : segment_(request),
      me_(request.member),
      ranks_(request.ranks),
      spins_(comm::spins(ranks_.size() > std::thread::hardware_concurrency())) {
  const std::string process = this_process();
  write_text(block().process, process);
  block().process_bytes = static_cast<uint32_t>(std::min(process.size(), block().process.size() - 1));
}

Member::~Member() { leave(); }

bool Member::all_reached(Counter counter, uint64_t value) const {
  for (int64_t i = 0; i < size(); ++i) {
    if ((segment_.member(i).*counter).value.load() < value) return false;
  }
  return true;
}

void Member::reach(Counter counter, uint64_t value) const {
  (block().*counter).value.store(value);
  // Who sleeps has said so before it looked at the counters; whoever comes last wakes all.
  GroupBlock& group = segment_.group();
  if (group.sleepers.value.load() > 0 && all_reached(counter, value)) wake(group.event);
}

void Member::wait_for_all(Counter counter, uint64_t value, Milliseconds timeout,
                          c10::function_ref<std::string()> what) {
  for (int i = 0; i < spins_; ++i) {
    if (all_reached(counter, value)) return;
    comm::pause_cpu();
  }
  wait_long(counter, value, timeout, what);
}

std::vector<int64_t> Member::behind(Counter counter, uint64_t value) const {
  std::vector<int64_t> members;
  for (int64_t i = 0; i < size(); ++i) {
    if ((segment_.member(i).*counter).value.load() < value) members.push_back(i);
  }
  return members;
}

void Member::wait_long(Counter counter, uint64_t value, Milliseconds timeout,
                       c10::function_ref<std::string()> what) {
  const auto start = Clock::now();
  const auto is_done = [&] { return all_reached(counter, value); };
  for (const auto end = start + comm::kYielding; Clock::now() < end;) {
    if (is_done()) return;
    if (is_interrupted()) break;
    std::this_thread::yield();
  }
  const auto deadline = start + timeout;
  GroupBlock& group = segment_.group();
  for (Milliseconds pause = kFirstLook;; pause = std::min(2 * pause, kLastLook)) {
    // They may have posted what is waited for, and do something else.
    for (const int64_t member : behind(counter, value)) {
      if (member != me_) ring(member, /*always=*/true);
    }
    group.sleepers.value.fetch_add(1);
    const uint32_t seen = group.event.load();
    const auto left = deadline - Clock::now();
    if (!is_done() && !is_interrupted() && left.count() > 0)
      sleep_on(group.event, seen, std::min<std::chrono::nanoseconds>(left, pause));
    group.sleepers.value.fetch_sub(1);
    if (is_done()) return;
    check_not_interrupted(what);
    const std::vector<int64_t> awaited = behind(counter, value);
    for (const int64_t member : awaited) {
      const std::string reason = why_gone(member);
      if (reason.empty() || is_done()) continue;
      interrupt(reason);
      throw_peer_error(what(), reason);
    }
    if (Clock::now() < deadline || is_done()) continue;
    std::string text;
    for (const int64_t member : awaited)
      text += c10::str(text.empty() ? "rank " : ", rank ", ranks_[member], " (",
                       segment_.member(member).posted.value.load(), " collectives so far)");
    const std::string reason = c10::str("rank ", ranks_[me_], " timed out: it gave up after ",
                                        timeout.count(), " ms of waiting for ", text);
    fail(reason);
    throw_peer_error(what(), reason);
  }
}

void Member::throw_peer_error(const std::string& what, const std::string& reason) const {
  throw comm::PeerError(c10::str("Rank ", ranks_[me_], " cannot complete ", what, " of group ",
                                 c10::IntArrayRef(ranks_), ": ", reason, "."));
}

void Member::check_not_interrupted(c10::function_ref<std::string()> what) const {
  if (is_interrupted()) [[unlikely]]
    throw_peer_error(what(), failure());
}

std::string Member::failure() const {
  {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return reason_;
  }
  GroupBlock& group = segment_.group();
  // Who writes it may die while it does.
  for (int i = 0; i < 1000 && group.failure.value.load() == GroupBlock::being_written; ++i)
    std::this_thread::sleep_for(std::chrono::microseconds(10));
  return group.failure.value.load() == GroupBlock::written ? group.reason.data() : "the group has failed";
}

void Member::interrupt(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = reason;
  }
  interrupted_ = true;
  wake(segment_.group().event);
  wake(block().bell);
}

void Member::fail(const std::string& reason) {
  GroupBlock& group = segment_.group();
  uint32_t expected = GroupBlock::none;
  if (group.failure.value.compare_exchange_strong(expected, GroupBlock::being_written)) {
    write_text(group.reason, reason);
    group.failure.value = GroupBlock::written;
  }
  wake(group.event);
  for (int64_t i = 0; i < size(); ++i) ring(i, /*always=*/true);
}

void Member::abort() { fail(c10::str("rank ", ranks_[me_], " aborted the group")); }

std::string Member::why_gone(int64_t member) {
  MemberBlock& other = segment_.member(member);
  if (other.has_left.load())
    return c10::str("rank ", ranks_[member], " has ended after ", other.posted.value.load(),
                    " collectives of this group and takes part in no more");
  const std::string process(other.process.data(), other.process_bytes.load());
  if (process.empty()) return "";  // it has yet to come
  const std::lock_guard lock(mutex_);
  auto watch = watches_.find(member);
  if (watch == watches_.end()) watch = watches_.emplace(member, ProcessWatch(process)).first;
  const auto end = watch->second.end();
  return end ? c10::str("rank ", ranks_[member], " (", describe_process(process), ") ", *end) : "";
}

void Member::listen(c10::function_ref<bool()> is_done, std::chrono::nanoseconds limit) const {
  MemberBlock& mine = block();
  mine.listeners.fetch_add(1);
  const uint32_t seen = mine.bell.load();
  if (limit.count() > 0 && !is_done() && !is_interrupted()) sleep_on(mine.bell, seen, limit);
  mine.listeners.fetch_sub(1);
}

void Member::ring(int64_t member, bool always) const {
  MemberBlock& other = segment_.member(member);
  if (always || other.listeners.load() > 0) wake(other.bell);
}

void Member::start_helper(const std::function<void()>& help) {
  const std::lock_guard lock(mutex_);
  if (helper_.joinable() || has_left_) return;
  helper_ = std::thread([this, help] {
    Futex& bell = block().bell;
    uint32_t seen = bell.load();
    while (!interrupted_.load()) {
      help();
      sleep_on(bell, seen, std::chrono::hours(1));
      seen = bell.load();
    }
  });
}

void Member::leave() {
  {
    const std::lock_guard lock(mutex_);
    if (has_left_) return;
    has_left_ = true;
  }
  interrupt("this rank has left the group");
  if (helper_.joinable()) helper_.join();
  block().has_left = 1;
  wake(segment_.group().event);
  for (int64_t i = 0; i < size(); ++i) ring(i, /*always=*/false);
}

}  // namespace tessera::shm
