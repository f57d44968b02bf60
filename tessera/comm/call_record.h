#pragma once

#include <tessera/comm/world.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// A call that a rank has made, for other ranks to read.
struct RecordedCall {
  std::string group;    // "[0, 2]"
  uint64_t number = 0;  // of the calls of this rank on that group, from 1
  std::string text;     // "all_reduce(Float[3, 4])"
  std::string common;   // what must be the same on all ranks of the group
};

/// What a rank is doing, and its last collectives, the oldest first.
struct RankState {
  std::string text;  // completes "rank 2 is "
  std::vector<RecordedCall> calls;
};
std::string to_bytes(const RankState& state);
/// Throws if they are none.
RankState state_from_bytes(std::string_view bytes);

/// The last collectives, sends and receives of a rank that is a process: always kept, of bounded size, and cheap. Ranks
/// that are threads need none, as they see each other. Safe to use from several threads.
class CallRecord {
 public:
  /// Notes a call on a group of these ranks, which messages call `label`. `tensor` is what it is about, or
  /// null. `name` is a literal.
  uint64_t begin(const char* name, const at::Tensor* tensor, const Group& group,
                 const std::vector<int64_t>& ranks, const std::string& label);
  /// Another part of the call has begun: it ends when all have.
  void join(uint64_t id);
  /// Messages call the group so from now on, whatever `begin` says.
  void set_label(const Group& group, std::string label);
  /// The call, or a part of it, has ended.
  void end(uint64_t id);

  /// "all_reduce(Float[3, 4]), call 41 of group [0, 2]".
  std::string describe(uint64_t id) const;

  RankState state() const;
  /// The description of the last call that is under way on a group that `rank` is in; empty if there is none.
  std::string call_with(int64_t rank) const;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kCalls = 32, kDims = 6;
  struct GroupCalls {
    std::vector<int64_t> ranks;
    std::string label;
    uint64_t collectives = 0, messages = 0;
  };
  struct Entry {
    uint64_t id = 0;  // from 1
    const char* name = nullptr;
    const GroupCalls* group = nullptr;
    uint64_t number = 0;
    Clock::time_point begin, end;
    bool is_message = false;  // a send or a receive
    int parts = 0;            // that are under way
    bool has_tensor = false;
    at::ScalarType dtype = at::kFloat;
    size_t dims = 0;
    std::array<int64_t, kDims> sizes{};
  };
  static std::string text_of(const Entry& entry);
  static std::string common_of(const Entry& entry);
  static std::string full_text_of(const Entry& entry);
  const Entry* find(uint64_t id) const;

  mutable std::mutex mutex_;
  std::array<Entry, kCalls> entries_{};
  uint64_t count_ = 0;
  std::unordered_map<const c10d::ProcessGroup*, GroupCalls> groups_;  // they live as long as their world
};

}  // namespace tessera
