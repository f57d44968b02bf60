#pragma once

#include <tessera/comm/parcel.h>
#include <tessera/comm/shm/member.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera::shm {

/// The messages of one member of a group whose ranks are processes that share memory.
///
/// They go from each member to each other one through a channel, in the order in which they were sent. The receiver takes
/// them out of it into the tensors that it wants them in, by source and tag, or keeps them until it does, and answers. A
/// message is sent when it was answered.
class Messages {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Parcel = comm::Parcel;

  explicit Messages(Member& member);

  // See Poster.
  std::shared_ptr<Parcel> send(int64_t to, int tag, const at::Tensor& tensor);
  std::shared_ptr<Parcel> receive(int64_t from, int tag, const at::Tensor& tensor);
  void wait(const std::shared_ptr<Parcel>& parcel, bool sending, Milliseconds timeout);
  bool poll(const Parcel& parcel);
  /// Moves what can be moved.
  void help();

 private:
  static constexpr size_t kDims = 8;
  /// What goes before the data.
  struct Head {
    uint64_t number;  // of the message in its channel: 1, 2, ...
    uint64_t bytes;
    int64_t elements;
    int32_t tag, dtype;
    uint64_t dims;
    int64_t sizes[kDims];
  };
  struct Sent {
    std::shared_ptr<Parcel> parcel;
    Head head;
    uint64_t written = 0;  // of head and data
  };
  /// A message that comes, or has come.
  struct Received {
    int64_t from = 0;
    Head head{};
    uint64_t read = 0;               // of head and data
    at::Tensor kept;                 // its data, unless that goes where the parcel wants it
    std::shared_ptr<Parcel> parcel;  // who wants it; null if nobody does so far
    bool is_refused = false;         // it did not fit
  };
  struct Peer {
    std::deque<Sent> queue;       // not yet written, or not all of it
    std::deque<Sent> unanswered;  // written
    uint64_t last = 0;            // number of the last message sent
    std::shared_ptr<Received> coming;
  };

  // All with the lock.
  void advance();
  bool write_to(int64_t peer);
  bool take_answers_of(int64_t peer);
  bool read_from(int64_t peer);
  /// Nobody wants it so far. If there is no memory for that, the group fails.
  void keep(const std::shared_ptr<Received>& message);
  void match(const std::shared_ptr<Received>& message, const std::shared_ptr<Parcel>& parcel);
  void deliver(Received& message);
  void answer(const Received& message, const std::string& misfit);
  std::string text_of(const Received& message) const;
  /// True if nobody touches its tensor any more.
  bool take_back(const std::shared_ptr<Parcel>& parcel, bool sending);

  Member& member_;
  const int64_t me_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::list<std::shared_ptr<Received>>
      kept_;  // those that nobody wants so far, in the order in which they came
  std::list<std::shared_ptr<Parcel>> wanted_;  // in the order in which they were posted
};

}  // namespace tessera::shm
