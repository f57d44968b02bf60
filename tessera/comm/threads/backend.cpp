#include <tessera/comm/posting_backend.h>
#include <tessera/comm/threads/backend.h>
#include <tessera/comm/threads/hub.h>
#include <tessera/error.h>

namespace tessera::threads {

namespace {

/// A member of a group at its meeting point.
class ThreadsPoster final : public Poster {
 public:
  ThreadsPoster(std::shared_ptr<MeetingPoint> point, int64_t member)
      : point_(std::move(point)), member_(member) {}

  uint64_t post(CollectiveCall call, Milliseconds timeout) override {
    return point_->collectives.post(member_, std::move(call), timeout);
  }
  void wait(uint64_t number, Milliseconds timeout, c10::function_ref<std::string()> what) override {
    point_->collectives.wait(member_, number, timeout, what);
  }
  bool poll(uint64_t number) override { return point_->collectives.poll(number); }

  std::shared_ptr<Parcel> send(int64_t to, int tag, const at::Tensor& tensor) override {
    return point_->mailbox.send(member_, to, tag, tensor);
  }
  std::shared_ptr<Parcel> receive(int64_t from, int tag, const at::Tensor& tensor) override {
    return point_->mailbox.receive(member_, from, tag, tensor);
  }
  void wait(const std::shared_ptr<Parcel>& parcel, bool sending, Milliseconds timeout,
            bool is_final) override {
    point_->mailbox.wait(parcel, sending, timeout, is_final);
  }
  bool poll(const Parcel& parcel) override { return parcel.state != Parcel::waiting; }

  void abort() override {
    point_->collectives.abort(
        c10::str("rank ", point_->collectives.members()[member_], " aborted the group"));
  }
  void leave() override {}  // the hub says so, of all groups

 private:
  const std::shared_ptr<MeetingPoint> point_;
  const int64_t member_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_threads_backend(const BackendRequest& request) {
  TESSERA_CHECK(request.hub,
                "The \"threads\" backend connects ranks that are threads of one process; start them with "
                "tessera::run. For ranks that are processes use \"shm\", \"gloo\" or \"nccl\".");
  auto point = request.hub->meeting_point(request.ranks, request.name);
  return c10::make_intrusive<PostingBackend>(
      kBackendName, std::make_shared<ThreadsPoster>(std::move(point), request.member), request.member,
      static_cast<int64_t>(request.ranks.size()), request.timeout);
}

}  // namespace tessera::threads
