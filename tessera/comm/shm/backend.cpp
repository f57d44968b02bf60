#include <tessera/comm/posting_backend.h>
#include <tessera/comm/shared_error.h>
#include <tessera/comm/shm/backend.h>
#include <tessera/comm/shm/collectives.h>
#include <tessera/comm/shm/messages.h>
#include <tessera/error.h>

namespace tessera::shm {

namespace {

class ShmPoster final : public Poster {
 public:
  explicit ShmPoster(const BackendRequest& request)
      : member_(request), collectives_(member_), messages_(member_) {}
  ~ShmPoster() override { member_.leave(); }

  uint64_t post(comm::CollectiveCall call, Milliseconds timeout) override {
    return collectives_.post(std::move(call), timeout, needs_help_);
  }
  void wait(uint64_t number, Milliseconds timeout, c10::function_ref<std::string()> what) override {
    collectives_.wait(number, timeout, what);
  }
  bool poll(uint64_t number) override { return collectives_.poll(number); }

  std::shared_ptr<comm::Parcel> send(int64_t to, int tag, const at::Tensor& tensor) override {
    needs_help_();  // before it is posted, as it may throw
    return messages_.send(to, tag, tensor);
  }
  std::shared_ptr<comm::Parcel> receive(int64_t from, int tag, const at::Tensor& tensor) override {
    needs_help_();
    return messages_.receive(from, tag, tensor);
  }
  void wait(const std::shared_ptr<comm::Parcel>& parcel, bool sending, Milliseconds timeout,
            bool /*is_final*/) override {
    messages_.wait(parcel, sending, timeout);
  }
  bool poll(const comm::Parcel& parcel) override { return messages_.poll(parcel); }

  void abort() override { member_.abort(); }
  void leave() override { member_.leave(); }

 private:
  Member member_;
  Collectives collectives_;
  Messages messages_;
  const std::function<void()> needs_help_ = [this] {
    if (has_helper_.exchange(true)) return;
    try {
      member_.start_helper([this] { help(); });
    } catch (...) {  // there are no threads left now
      has_helper_ = false;
      throw;
    }
  };
  /// On the helper, where nobody can catch what it throws.
  void help() {
    try {
      messages_.help();
      collectives_.help();
    } catch (...) {
      member_.fail(c10::str("rank ", member_.ranks()[member_.me()],
                            " failed: ", comm::message_of(std::current_exception())));
    }
  }
  std::atomic<bool> has_helper_{false};
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_shm_backend(const BackendRequest& request) {
  TESSERA_CHECK(request.store,
                "The \"shm\" backend needs a store through which the processes find one another; set "
                "WorldOptions::store.");
  return c10::make_intrusive<PostingBackend>(kBackendName, std::make_shared<ShmPoster>(request),
                                             request.member, static_cast<int64_t>(request.ranks.size()),
                                             request.timeout);
}

}  // namespace tessera::shm
