#pragma once

#include <tessera/comm/backends.h>
#include <tessera/comm/reduction.h>
#include <tessera/comm/shm/futex.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::shm {

/// What is written by one process and read by others stands in lines of its own.
inline constexpr size_t kLine = 64;

template <class T>
struct alignas(kLine) Shared {
  std::atomic<T> value{0};
  static_assert(std::atomic<T>::is_always_lock_free);
};

/// A call that a member has posted: what it calls, and its data if that is little.
struct alignas(kLine) PostedCall {
  /// Most calls fit into as many bytes. Of others, the members exchange the rest through the staging areas.
  static constexpr size_t kCallBytes = 960;
  static constexpr size_t kDataBytes = 8 << 10;

  uint32_t call_bytes;  // of the whole call
  uint32_t has_data;    // whether all that the others need of this member's data is here
  std::array<std::byte, kCallBytes> call;
  alignas(kLine) std::array<std::byte, kDataBytes> data;
};

/// What a member says to all others.
struct MemberBlock {
  /// A member can have as many collectives under way.
  static constexpr uint64_t kWindow = 32;

  Shared<uint64_t> posted;  // the number of its last collective
  Shared<uint64_t> done;    // collectives that it needs nothing more of
  Shared<uint64_t> step;    // of the staging areas: see Collectives
  alignas(kLine)
      Futex bell;  // there is something for it to look at: its helper and who waits for messages sleep here
  std::atomic<uint32_t> listeners;  // how many wait for messages
  std::atomic<uint32_t> has_left;
  std::atomic<uint32_t> process_bytes;  // written after the text; 0: it has yet to come
  std::array<char, 256> process;        // see this_process()
  std::array<PostedCall, kWindow> calls;
};

/// The messages from one member to another: a ring of bytes, in which heads and data follow one another, and the answers.
struct Channel {
  static constexpr uint64_t kRingBytes = 128 << 10;
  /// As many can be sent and not yet answered.
  static constexpr uint64_t kMessages = 64;

  struct Answer {
    std::atomic<uint64_t> value;   // twice the number of the message, plus one if it did not fit
    std::array<char, 248> wanted;  // then: what was wanted
  };

  Shared<uint64_t> written;  // bytes, by the sender
  Shared<uint64_t> read;     // bytes, by the receiver
  alignas(kLine) std::array<Answer, kMessages> answers;
  alignas(kLine) std::array<std::byte, kRingBytes> ring;
};

/// What stands first.
struct GroupBlock {
  Futex event;  // something that all members wait for has happened
  Shared<uint32_t> sleepers;
  enum Failure : uint32_t { none, being_written, written };
  Shared<uint32_t> failure;
  std::array<char, 1024> reason;  // once written
};

/// Writes what another process will read. A line that the other has in its cache takes long to be written there (measured:
/// 37 ns a line, 15 times as long as past the caches), so all but a little goes past them.
inline void write_shared(std::byte* target, const std::byte* source, size_t bytes) {
  constexpr size_t kLittle = 512;
  comm::copy_bytes(target, source, bytes, /*streaming=*/bytes > kLittle);
}

/// The memory that the members of a group share, mapped by each of them. It has no name: it is gone when the last of them
/// is, however they end.
class Segment {
 public:
  /// As many bytes of each member are staged at a time.
  static constexpr size_t kStageBytes = 256 << 10;

  /// Makes it together with the other members, who find each other by the request's store. Throws if they are not on one
  /// host, or one of them does not come within the request's timeout.
  explicit Segment(const BackendRequest& request);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int64_t size() const { return members_; }
  GroupBlock& group() const { return *at<GroupBlock>(0); }
  MemberBlock& member(int64_t member) const;
  Channel& channel(int64_t from, int64_t to) const;
  /// Of step `step`; the areas of two steps in a row are different ones.
  std::byte* staged(int64_t member, uint64_t step) const;
  std::byte* results(uint64_t step) const;

 private:
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }
  void map(int file);

  const int64_t members_;
  size_t members_at_ = 0, stages_at_ = 0, results_at_ = 0, channels_at_ = 0, bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace tessera::shm
