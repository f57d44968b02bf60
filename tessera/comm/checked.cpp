#include <tessera/comm/agreement.h>
#include <tessera/comm/blocking.h>
#include <tessera/comm/call_backend.h>
#include <tessera/comm/call_bytes.h>
#include <tessera/comm/called.h>
#include <tessera/comm/checked.h>
#include <tessera/comm/posting.h>
#include <tessera/comm/waits.h>
#include <tessera/comm/within.h>
#include <tessera/error.h>

#include <algorithm>
#include <cstring>
#include <span>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace tessera {

using comm::CollectiveCall;

namespace {

class CheckedBackend final : public CallBackend {
 public:
  CheckedBackend(c10::intrusive_ptr<c10d::Backend> inner, std::vector<int64_t> ranks, c10::DeviceType device)
      : CallBackend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        ranks_(std::move(ranks)),
        options_(at::TensorOptions().dtype(at::kByte).device(device)) {}

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  void startCoalescing() override { inner_->startCoalescing(); }
  Work endCoalescing() override { return inner_->endCoalescing(); }
  void abort() override { inner_->abort(); }
  void shutdown() override { inner_->shutdown(); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  Work send(Tensors& tensors, int to, int tag) override { return inner_->send(tensors, to, tag); }
  Work recv(Tensors& tensors, int from, int tag) override { return inner_->recv(tensors, from, tag); }
  Work recvAnysource(Tensors& tensors, int tag) override { return inner_->recvAnysource(tensors, tag); }

 private:
  Work submit(comm::CallBuilder& builder, c10d::OpType /*type*/, Tensors /*results*/,
              std::chrono::milliseconds /*timeout*/, Forward forward) override {
    const auto* called = comm::CalledBase::outermost();
    CollectiveCall call = called ? called->call() : builder.build();
    call.asked = comm::Agreement::asked(*this);
    call.within = comm::Within::current();
    try {
      compare(call);
    } catch (...) {
      comm::Agreement::count_shared_error();
      throw;
    }
    return forward(*inner_);
  }
  comm::CallBuilder::Content content() const override { return comm::CallBuilder::Content::sizes; }

  /// Throws on all ranks unless their calls match.
  void compare(const CollectiveCall& call) {
    std::vector<std::byte> bytes(sizeof(int64_t));
    comm::append_call(call, bytes);
    const auto size = static_cast<int64_t>(bytes.size());
    std::memcpy(bytes.data(), &size, sizeof size);
    at::Tensor all = rows_of_all(bytes, kFirstBytes);
    int64_t longest = 0;
    for (int rank = 0; rank < getSize(); ++rank) longest = std::max(longest, written_at(all, rank));
    if (longest > kFirstBytes) all = rows_of_all(bytes, longest);
    std::vector<std::span<const std::byte>> calls;
    for (int rank = 0; rank < getSize(); ++rank) {
      const auto* first = static_cast<const std::byte*>(all.const_data_ptr()) + rank * all.size(1);
      calls.emplace_back(first + sizeof(int64_t), written_at(all, rank) - sizeof(int64_t));
    }
    comm::make_plan_of(calls, ranks_, plan_);
  }

  /// How many bytes rank `rank` has to say; they stand at the beginning of what it says.
  static int64_t written_at(const at::Tensor& all, int rank) {
    int64_t size = 0;
    std::memcpy(&size, static_cast<const std::byte*>(all.const_data_ptr()) + rank * all.size(1), sizeof size);
    return size;
  }

  /// Most calls fit into as many bytes, and need one all-gather.
  static constexpr int64_t kFirstBytes = 1024;

  /// The first `count` bytes of each rank, a row each.
  at::Tensor rows_of_all(std::vector<std::byte> bytes, int64_t count) {
    bytes.resize(count);
    at::Tensor input = at::from_blob(bytes.data(), {count}, at::kByte).to(options_.device());
    at::Tensor output = at::empty({getSize() * count}, options_);
    const Blocking blocking;
    const Wait wait(ranks_[getRank()], [this] {
      return c10::str("to compare its next collective with those of ranks ", c10::IntArrayRef(ranks_));
    });
    comm::wait_in_call(inner_->_allgather_base(output, input), inner_);
    return output.cpu().view({getSize(), count});
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::vector<int64_t> ranks_;
  const at::TensorOptions options_;
  comm::CollectivePlan plan_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_checked(c10::intrusive_ptr<c10d::Backend> backend,
                                               std::vector<int64_t> ranks, c10::DeviceType device) {
  return c10::make_intrusive<CheckedBackend>(std::move(backend), std::move(ranks), device);
}

}  // namespace tessera
