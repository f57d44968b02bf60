#include <tessera/comm/blocking_work.h>
#include <tessera/comm/call_bytes.h>
#include <tessera/comm/reduction.h>
#include <tessera/comm/shm/collectives.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstring>
#include <span>

namespace tessera::shm {

using comm::Buffer;
using comm::Collective;
using comm::CollectiveCall;
using comm::Task;

namespace {

constexpr uint64_t kRound = Segment::kStageBytes;
/// An all-reduce of more than this, times the ranks, is reduced in slices: less is not worth a second wait.
constexpr uint64_t kSlicedBytes = 64 << 10;
/// Writing more than this goes past the caches: it would not stay in them until somebody reads it.
constexpr uint64_t kStreamingBytes = 32 << 20;

uint64_t bytes_in(const Buffer& buffer) {
  return static_cast<uint64_t>(buffer.elements) * c10::elementSize(buffer.dtype);
}
uint64_t in_lines(uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

/// Whether the others need what `member` gives.
bool gives(const CollectiveCall& call, int64_t member) {
  return call.kind != Collective::broadcast || call.root == member;
}

}  // namespace

Collectives::Collectives(Member& member)
    : member_(member),
      me_(member.me()),
      size_(member.size()),
      all_calls_(static_cast<size_t>(size_)),
      staged_bytes_(static_cast<size_t>(size_)),
      sources_(static_cast<size_t>(size_)) {}

PostedCall& Collectives::shared_call(int64_t member, uint64_t number) const {
  return member_.segment().member(member).calls[number % kWindow];
}

bool Collectives::share_data(const CollectiveCall& call, PostedCall& shared) const {
  if (size_ == 1 || !gives(call, me_)) return true;
  uint64_t bytes = 0;
  for (const Buffer& buffer : call.in) bytes += in_lines(bytes_in(buffer));
  if (bytes > PostedCall::kDataBytes) return false;
  std::byte* target = shared.data.data();
  for (const Buffer& buffer : call.in) {
    if (const uint64_t size = bytes_in(buffer)) write_shared(target, buffer.data, size);
    target += in_lines(bytes_in(buffer));
  }
  return true;
}

uint64_t Collectives::post(CollectiveCall call, Milliseconds timeout,
                           const std::function<void()>& needs_help) {
  const std::lock_guard lock(posting_);
  if (member_.is_interrupted()) return kNever;
  const uint64_t number = posted_ + 1;
  try {
    if (number > kWindow) finish_all_until(number - kWindow, timeout);
  } catch (const comm::PeerError&) {
    return kNever;
  }
  Posted& mine = posted_call(number);
  mine.call = std::move(call);
  mine.timeout = timeout;
  mine.bytes.clear();
  append_call(mine.call, mine.bytes);
  PostedCall& shared = shared_call(me_, number);
  shared.call_bytes = static_cast<uint32_t>(mine.bytes.size());
  std::memcpy(shared.call.data(), mine.bytes.data(), std::min(mine.bytes.size(), PostedCall::kCallBytes));
  shared.has_data = share_data(mine.call, shared);
  const bool needs_only_this = shared.has_data && mine.bytes.size() <= PostedCall::kCallBytes;
  // Before it is posted, as it may throw.
  if (!needs_only_this || done_ + 1 < number) needs_help();
  posted_ = number;
  member_.reach(&MemberBlock::posted, number);
  return number;
}

void Collectives::finish_all_until(uint64_t number, Milliseconds timeout) {
  const auto what = [] {
    return c10::str("a collective posted ", kWindow, " before this one and not yet done");
  };
  catch_up(number, timeout, what);
  member_.wait_for_all(&MemberBlock::done, number, timeout, what);
}

void Collectives::wait(uint64_t number, Milliseconds timeout, What what) {
  catch_up(number, timeout, what);
  if (!has_failures_) return;
  std::unique_lock lock(failing_);
  const auto failure = failures_.extract(number);  // its work keeps it
  has_failures_ = !failures_.empty();
  lock.unlock();
  if (failure) comm::throw_error(failure.mapped().kind, failure.mapped().text);
}

void Collectives::catch_up(uint64_t number, Milliseconds timeout, What what) {
  if (done_ < number) {
    const std::lock_guard lock(executing_);
    execute_until(number, timeout, what);
  }
  if (done_ < posted_ && missed_.exchange(false)) member_.ring(me_, /*always=*/true);
}

bool Collectives::poll(uint64_t number) {
  help();
  return done_ >= number || member_.is_interrupted();
}

void Collectives::help() {
  std::unique_lock lock(executing_, std::try_to_lock);
  if (!lock) {
    missed_ = true;
    if (!lock.try_lock()) return;
  }
  try {
    while (!member_.is_interrupted() && done_ < posted_ &&
           member_.all_reached(&MemberBlock::posted, done_ + 1)) {
      const uint64_t number = done_ + 1;
      const CollectiveCall& call = posted_call(number).call;
      execute(number, posted_call(number).timeout, [&] { return describe(call); });
    }
  } catch (const comm::PeerError&) {  // who waits for it gets it too
  }
}

void Collectives::execute_until(uint64_t number, Milliseconds timeout, What what) {
  while (done_ < number) {
    const uint64_t next = done_ + 1;
    execute(next, timeout, [&] { return c10::str(what(), " (collective ", next, ")"); });
  }
}

void Collectives::execute(uint64_t number, Milliseconds timeout, What what) {
  member_.check_not_interrupted(what);
  member_.wait_for_all(&MemberBlock::posted, number, timeout, what);
  bool is_direct = true;
  for (int64_t i = 0; i < size_; ++i) is_direct = is_direct && shared_call(i, number).has_data;
  if (make_plan(number, is_direct, timeout, what)) {
    const CollectiveCall& call = posted_call(number).call;
    uint64_t written = 0;
    for (const Buffer& buffer : call.out) written += bytes_in(buffer);
    streaming_ = written >= kStreamingBytes;
    if (is_direct) {
      run_direct();
    } else {
      const bool is_sliced =
          call.kind == Collective::all_reduce && written * static_cast<uint64_t>(size_) > kSlicedBytes;
      run_staged(is_sliced, timeout, what);
    }
  }
  finish(number);
}

void Collectives::finish(uint64_t number) {
  Posted& mine = posted_call(number);
  mine.call = {};
  done_ = number;
  member_.reach(&MemberBlock::done, number);
}

bool Collectives::make_plan(uint64_t number, bool is_direct, Milliseconds timeout, What what) {
  const Posted& mine = posted_call(number);
  const size_t size = mine.bytes.size();
  bool is_alike = size <= PostedCall::kCallBytes && mine.call.asked.kind == comm::ErrorKind::none;
  for (int64_t i = 0; i < size_ && is_alike; ++i) {
    const PostedCall& other = shared_call(i, number);
    is_alike = i == me_ ||
               (other.call_bytes == size && std::memcmp(other.call.data(), mine.bytes.data(), size) == 0);
  }
  std::vector<std::vector<std::byte>> bytes;
  if (!is_alike) bytes = all_call_bytes(number, timeout, what);
  for (int64_t i = 0; i < size_; ++i) {
    CollectiveCall& call = all_calls_[i];
    if (is_alike) {
      call.kind = mine.call.kind;
      call.joined = mine.call.joined;
      call.root = mine.call.root;
      call.op = mine.call.op;
      call.factor = mine.call.factor;
      call.in = mine.call.in;
      call.out = mine.call.out;
      call.asked = {};
    } else {
      call = comm::call_from_bytes(bytes[i], /*with_text=*/false);
    }
    if (i == me_) {
      call.in = mine.call.in;
      call.out = mine.call.out;
      continue;
    }
    for (Buffer& buffer : call.out) buffer.data = nullptr;
    std::byte* data = is_direct && gives(call, i) ? shared_call(i, number).data.data() : nullptr;
    for (Buffer& buffer : call.in) {
      buffer.data = data;
      if (data) data += in_lines(bytes_in(buffer));
    }
  }
  try {
    comm::make_plan(all_calls_, member_.ranks(), plan_);
    return true;
  } catch (const c10::Error&) {
    if (is_alike) bytes.assign(size_, mine.bytes);
  }
  try {
    const std::vector<std::span<const std::byte>> spans(bytes.begin(), bytes.end());
    comm::make_plan_of(spans, member_.ranks(), plan_);  // throws it with the descriptions
  } catch (const c10::Error& error) {
    const std::lock_guard lock(failing_);
    failures_[number] = {comm::kind_of(std::current_exception()), error.what_without_backtrace()};
    has_failures_ = true;
  }
  return false;
}

std::vector<std::vector<std::byte>> Collectives::all_call_bytes(uint64_t number, Milliseconds timeout,
                                                                What what) {
  std::vector<std::vector<std::byte>> bytes(size_);
  uint64_t longest = 0;
  for (int64_t i = 0; i < size_; ++i) {
    const PostedCall& shared = shared_call(i, number);
    bytes[i].resize(shared.call_bytes);
    longest = std::max<uint64_t>(longest, shared.call_bytes);
    std::memcpy(bytes[i].data(), shared.call.data(),
                std::min<size_t>(shared.call_bytes, PostedCall::kCallBytes));
  }
  if (longest <= PostedCall::kCallBytes) return bytes;
  const std::vector<std::byte>& mine = posted_call(number).bytes;
  for (uint64_t begin = 0; begin < longest; begin += kRound) {
    const auto bytes_of = [&](const std::vector<std::byte>& call) {
      return call.size() > begin ? std::min<uint64_t>(call.size() - begin, kRound) : 0;
    };
    if (const uint64_t count = bytes_of(mine))
      std::memcpy(member_.segment().staged(me_, step_ + 1), mine.data() + begin, count);
    next_step(timeout, what);
    for (int64_t i = 0; i < size_; ++i) {
      if (const uint64_t count = bytes_of(bytes[i]); count && i != me_)
        std::memcpy(bytes[i].data() + begin, member_.segment().staged(i, step_), count);
    }
  }
  bytes[me_] = mine;
  return bytes;
}

void Collectives::run_direct() const {
  for (const Task& task : plan_.tasks) {
    std::byte* const* sources = plan_.pointers.data() + task.first_source;
    for (uint32_t t = task.first_target; t < task.first_target + task.targets; ++t) {
      if (plan_.owners[t] != static_cast<uint32_t>(me_)) continue;
      std::byte* target = plan_.pointers[t];
      if (plan_.op != c10d::ReduceOp::UNUSED) {
        comm::reduce_values(task.dtype, plan_.op, plan_.factor, sources, task.sources, &target, 1, 0,
                            task.elements);
      } else if (target != sources[0]) {
        comm::copy_bytes(target, sources[0],
                         static_cast<size_t>(task.elements) * c10::elementSize(task.dtype), streaming_);
      }
    }
  }
}

uint64_t Collectives::prepare_parts() {
  parts_.clear();
  std::fill(staged_bytes_.begin(), staged_bytes_.end(), 0);
  const auto me = static_cast<uint32_t>(me_);
  for (const Task& task : plan_.tasks) {
    Part& part = parts_.emplace_back();
    part.bytes = static_cast<uint64_t>(task.elements) * c10::elementSize(task.dtype);
    part.source = plan_.owners[task.first_source];
    // Where several give, all do, and all give as much.
    part.begin = staged_bytes_[part.source];
    for (uint32_t s = task.first_source; s < task.first_source + task.sources; ++s) {
      staged_bytes_[plan_.owners[s]] += in_lines(part.bytes);
      if (plan_.owners[s] == me) part.in = plan_.pointers[s];
    }
    for (uint32_t t = task.first_target; t < task.first_target + task.targets; ++t) {
      if (plan_.owners[t] == me) part.out = plan_.pointers[t];
    }
    part.is_staged = part.in && (!part.out || task.targets > 1);
  }
  const uint64_t most = *std::max_element(staged_bytes_.begin(), staged_bytes_.end());
  return (most + kRound - 1) / kRound;
}

void Collectives::next_step(Milliseconds timeout, What what) {
  ++step_;
  member_.reach(&MemberBlock::step, step_);
  member_.wait_for_all(&MemberBlock::step, step_, timeout, what);
}

void Collectives::run_staged(bool is_sliced, Milliseconds timeout, What what) {
  const uint64_t rounds = prepare_parts();
  if (!is_sliced) {
    for (uint64_t round = 0; round < rounds; ++round) {
      stage(round, false);
      next_step(timeout, what);
      take(round);
    }
    return;
  }
  // Each step stages one round, reduces the one before and takes the results of the one before that.
  for (uint64_t round = 0; round <= rounds; ++round) {
    if (round < rounds) stage(round, true);
    if (round > 0) reduce_slices(round - 1);
    next_step(timeout, what);
    if (round > 0) take_results(round - 1);
  }
}

Collectives::Range Collectives::in_round(const Part& part, uint64_t round) {
  return {std::max(part.begin, round * kRound), std::min(part.begin + part.bytes, round * kRound + kRound)};
}

Collectives::Range Collectives::slice_of(const Range& range, int64_t member) const {
  const auto count = static_cast<uint64_t>(size_), index = static_cast<uint64_t>(member);
  const uint64_t width = in_lines((range.end - range.begin + count - 1) / count);
  return {std::min(range.begin + index * width, range.end),
          std::min(range.begin + (index + 1) * width, range.end)};
}

void Collectives::stage(uint64_t round, bool is_sliced) const {
  std::byte* const area = member_.segment().staged(me_, step_ + 1);
  for (const Part& part : parts_) {
    const Range range = in_round(part, round);
    if (!part.is_staged || range.empty()) continue;
    const auto copy = [&](uint64_t begin, uint64_t end) {
      if (begin < end)
        write_shared(area + (begin - round * kRound), part.in + (begin - part.begin), end - begin);
    };
    // Nobody else needs what this member reduces itself.
    const Range mine = is_sliced ? slice_of(range, me_) : Range{range.end, range.end};
    copy(range.begin, mine.begin);
    copy(mine.end, range.end);
  }
}

void Collectives::reduce_range(const Task& task, const Part& part, const Range& range, uint64_t round,
                               std::byte* target) {
  for (int64_t i = 0; i < size_; ++i) {
    sources_[i] = i == me_ ? part.in + (range.begin - part.begin)
                           : member_.segment().staged(i, step_) + (range.begin - round * kRound);
  }
  const auto elements = static_cast<int64_t>((range.end - range.begin) / c10::elementSize(task.dtype));
  comm::reduce_values(task.dtype, plan_.op, plan_.factor, sources_.data(), size_, &target, 1, 0, elements);
}

void Collectives::take(uint64_t round) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    const Range range = in_round(part, round);
    if (!part.out || range.empty()) continue;
    std::byte* const target = part.out + (range.begin - part.begin);
    if (plan_.op != c10d::ReduceOp::UNUSED) {
      reduce_range(plan_.tasks[i], part, range, round, target);
      continue;
    }
    const std::byte* source =
        part.source == me_ ? part.in + (range.begin - part.begin)
                           : member_.segment().staged(part.source, step_) + (range.begin - round * kRound);
    if (source != target) comm::copy_bytes(target, source, range.end - range.begin, streaming_);
  }
}

void Collectives::reduce_slices(uint64_t round) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    const Range range = in_round(part, round);
    const Range mine = range.empty() ? range : slice_of(range, me_);
    if (mine.empty()) continue;
    std::byte* const target = part.out + (mine.begin - part.begin);
    reduce_range(plan_.tasks[i], part, mine, round, target);
    write_shared(member_.segment().results(step_) + (mine.begin - round * kRound), target,
                 mine.end - mine.begin);
  }
}

void Collectives::take_results(uint64_t round) const {
  // They were written before the last step began.
  const std::byte* const results = member_.segment().results(step_ - 1);
  for (const Part& part : parts_) {
    const Range range = in_round(part, round);
    if (range.empty()) continue;
    const Range mine = slice_of(range, me_);
    const auto copy = [&](uint64_t begin, uint64_t end) {
      if (begin < end)
        comm::copy_bytes(part.out + (begin - part.begin), results + (begin - round * kRound), end - begin,
                         streaming_);
    };
    copy(range.begin, mine.begin);
    copy(mine.end, range.end);
  }
}

}  // namespace tessera::shm
