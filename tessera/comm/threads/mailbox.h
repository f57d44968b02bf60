#pragma once

#include <tessera/comm/parcel.h>
#include <tessera/comm/threads/group_collectives.h>

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include <ATen/core/Tensor.h>

namespace tessera::threads {

using comm::kAnySource;
using comm::Parcel;

/// Messages between two members of a group. A send and a receive that match (source, destination and tag, in
/// the order posted) are brought together by whoever comes second, with one copy, from memory to memory.
class Mailbox {
 public:
  explicit Mailbox(GroupCollectives& collectives) : collectives_(collectives) {}

  std::shared_ptr<Parcel> send(int64_t from, int64_t to, int tag, const at::Tensor& tensor);
  /// `from` may be kAnySource.
  std::shared_ptr<Parcel> receive(int64_t to, int64_t from, int tag, const at::Tensor& tensor);

  /// Waits until the parcel is delivered. Throws if the two sides do not match, the peer has ended or
  /// `timeout` is over; then the parcel is taken back and its tensor is not touched any more. `is_final`: see
  /// Roster.
  void wait(const std::shared_ptr<Parcel>& parcel, bool sending, std::chrono::milliseconds timeout,
            bool is_final);

 private:
  using Queue = std::list<std::shared_ptr<Parcel>>;
  std::shared_ptr<Parcel> post(std::shared_ptr<Parcel> parcel, bool sending);
  void deliver(Parcel& sent, Parcel& wanted);

  GroupCollectives& collectives_;
  std::mutex mutex_;
  Queue sent_, wanted_;  // not yet matched
};

}  // namespace tessera::threads
