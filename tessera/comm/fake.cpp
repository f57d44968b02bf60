#include <tessera/comm/builtin_backends.h>
#include <tessera/comm/call_backend.h>

namespace tessera {

namespace {

/// Done before it began, like all work of a world in which nothing happens.
class FakeWork final : public c10d::Work {
 public:
  explicit FakeWork(std::vector<at::Tensor> results = {}) : results_(std::move(results)) { finish(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  std::vector<at::Tensor> result() override { return results_; }

 private:
  std::vector<at::Tensor> results_;
};

/// Takes every call, checks its arguments and moves nothing: outputs keep the values they had. For planning,
/// and for measuring what everything but the transport costs, in a world of any size.
class FakeBackend final : public CallBackend {
 public:
  using CallBackend::CallBackend;

  const std::string getBackendName() const override { return "fake"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  Work endCoalescing() override { return c10::make_intrusive<FakeWork>(); }
  Work send(Tensors&, int, int) override { return c10::make_intrusive<FakeWork>(); }
  Work recv(Tensors& tensors, int, int) override { return c10::make_intrusive<FakeWork>(tensors); }
  Work recvAnysource(Tensors& tensors, int) override { return c10::make_intrusive<FakeWork>(tensors); }

 private:
  Work submit(comm::CallBuilder&, c10d::OpType, Tensors results, std::chrono::milliseconds,
              Forward) override {
    return c10::make_intrusive<FakeWork>(std::move(results));
  }
  comm::CallBuilder::Content content() const override { return comm::CallBuilder::Content::sizes; }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_fake_backend(const BackendRequest& request) {
  return c10::make_intrusive<FakeBackend>(static_cast<int>(request.member),
                                          static_cast<int>(request.ranks.size()));
}

}  // namespace tessera
