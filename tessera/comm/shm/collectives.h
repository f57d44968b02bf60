#pragma once

#include <tessera/comm/call.h>
#include <tessera/comm/shm/member.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::shm {

/// The collectives of one member of a group whose ranks are processes that share memory.
///
/// A member posts what it calls, where all others see it. When all have posted, each checks that the calls match, makes the
/// plan, and carries out its own part: what it is to receive. All of them come to the same plan, or the same error.
///
///   - A little data is posted with the call. Then a collective needs nothing more of a member than its post.
///   - More goes through the staging areas, in steps: in each, every member writes what others need of it, then all wait
///     for each other, then each reads what it needs. As the areas of two steps in a row are different ones, one wait a
///     step is enough: who has come to the next step has read those of the step before.
///   - In a large all-reduce each member reduces a slice of what is staged, and writes the result to where all read it in
///     the next step.
///
/// Collectives are done in the order of their sequence numbers (1, 2, ...), reductions in the order of the members: the
/// results are the same bits that ranks get that are threads.
class Collectives {
 public:
  using Milliseconds = std::chrono::milliseconds;

  explicit Collectives(Member& member);

  /// See Poster. `needs_help` is called if the others may have to wait for this member later, while it does something else.
  uint64_t post(comm::CollectiveCall call, Milliseconds timeout, const std::function<void()>& needs_help);
  void wait(uint64_t number, Milliseconds timeout, c10::function_ref<std::string()> what);
  bool poll(uint64_t number);
  /// Carries out what all have posted.
  void help();

 private:
  static constexpr uint64_t kWindow = MemberBlock::kWindow;
  /// The number of what is posted to a group that has failed: who waits for it gets the error.
  static constexpr uint64_t kNever = UINT64_MAX;

  struct Posted {
    comm::CollectiveCall call;
    std::vector<std::byte> bytes;  // of the call
    Milliseconds timeout{};
  };
  /// What this member has to do with a task of the plan.
  struct Part {
    std::byte* in = nullptr;   // what it gives
    std::byte* out = nullptr;  // what it gets
    uint64_t begin = 0;        // where the task stands among all that the members stage
    uint64_t bytes = 0;
    int64_t source = 0;     // who stages it, if there is one source
    bool is_staged = true;  // others need what this member gives
  };
  struct Range {
    uint64_t begin = 0, end = 0;
    bool empty() const { return begin >= end; }
  };
  using What = c10::function_ref<std::string()>;

  Posted& posted_call(uint64_t number) { return calls_[number % kWindow]; }
  PostedCall& shared_call(int64_t member, uint64_t number) const;
  /// Waits until all members are done with it.
  void finish_all_until(uint64_t number, Milliseconds timeout);
  bool share_data(const comm::CollectiveCall& call, PostedCall& shared) const;

  /// Until that collective is done.
  void catch_up(uint64_t number, Milliseconds timeout, What what);

  // All with executing_ held.
  void execute_until(uint64_t number, Milliseconds timeout, What what);
  void execute(uint64_t number, Milliseconds timeout, What what);
  /// Makes the plan. False if the calls do not fit together: then that is noted.
  bool make_plan(uint64_t number, bool is_direct, Milliseconds timeout, What what);
  std::vector<std::vector<std::byte>> all_call_bytes(uint64_t number, Milliseconds timeout, What what);
  void run_direct() const;
  void run_staged(bool is_sliced, Milliseconds timeout, What what);
  uint64_t prepare_parts();  // returns how many rounds there are
  void next_step(Milliseconds timeout, What what);
  void finish(uint64_t number);

  // One round: what fits into the staging areas.
  static Range in_round(const Part& part, uint64_t round);
  Range slice_of(const Range& range, int64_t member) const;
  void stage(uint64_t round, bool is_sliced) const;
  void take(uint64_t round);
  void reduce_slices(uint64_t round);
  void take_results(uint64_t round) const;
  void reduce_range(const comm::Task& task, const Part& part, const Range& range, uint64_t round,
                    std::byte* target);

  Member& member_;
  const int64_t me_, size_;
  std::mutex posting_;
  std::array<Posted, kWindow> calls_;
  std::atomic<uint64_t> posted_{0}, done_{0};
  /// The helper was rung for while another thread carried something out: it is to look again after.
  std::atomic<bool> missed_{false};
  std::mutex executing_;  // of what follows, except failures
  uint64_t step_ = 0;
  std::vector<comm::CollectiveCall> all_calls_;
  comm::CollectivePlan plan_;
  std::vector<Part> parts_;
  std::vector<uint64_t> staged_bytes_;  // by member
  std::vector<std::byte*> sources_;
  bool streaming_ = false;

  std::mutex failing_;
  struct Failure {
    comm::ErrorKind kind;
    std::string text;
  };
  std::map<uint64_t, Failure> failures_;  // collectives whose calls did not fit
  std::atomic<bool> has_failures_{false};
};

}  // namespace tessera::shm
