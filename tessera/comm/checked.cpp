#include <tessera/comm/blocking.h>
#include <tessera/comm/call_backend.h>
#include <tessera/comm/checked.h>
#include <tessera/comm/waits.h>
#include <tessera/error.h>

#include <bit>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace tessera {

using comm::Buffer;
using comm::Collective;
using comm::CollectiveCall;

namespace {

/// A call as numbers, without the data: fixed fields, then the buffers, then the text a byte each.
std::vector<int64_t> encode(const CollectiveCall& call) {
  const std::string text = describe(call);
  std::vector<int64_t> words{static_cast<int64_t>(call.kind),
                             call.joined,
                             call.root,
                             static_cast<int64_t>(call.op),
                             std::bit_cast<int64_t>(call.factor),
                             static_cast<int64_t>(call.in.size()),
                             static_cast<int64_t>(call.out.size()),
                             static_cast<int64_t>(text.size())};
  for (const auto* buffers : {&call.in, &call.out}) {
    for (const Buffer& buffer : *buffers) {
      words.insert(words.end(), {buffer.elements, static_cast<int64_t>(buffer.dtype),
                                 std::bit_cast<int64_t>(buffer.shape)});
    }
  }
  words.insert(words.end(), text.begin(), text.end());
  return words;
}

CollectiveCall decode(const int64_t* words) {
  CollectiveCall call;
  call.kind = static_cast<Collective>(*words++);
  call.joined = *words++ != 0;
  call.root = *words++;
  call.op = static_cast<c10d::ReduceOp::RedOpType>(*words++);
  call.factor = std::bit_cast<double>(*words++);
  call.in.resize(*words++);
  call.out.resize(*words++);
  call.text.resize(*words++);
  for (auto* buffers : {&call.in, &call.out}) {
    for (Buffer& buffer : *buffers) {
      buffer.elements = *words++;
      buffer.dtype = static_cast<c10::ScalarType>(*words++);
      buffer.shape = std::bit_cast<uint64_t>(*words++);
    }
  }
  for (char& letter : call.text) letter = static_cast<char>(*words++);
  return call;
}

class CheckedBackend final : public CallBackend {
 public:
  CheckedBackend(c10::intrusive_ptr<c10d::Backend> inner, std::vector<int64_t> ranks, c10::DeviceType device)
      : CallBackend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        ranks_(std::move(ranks)),
        options_(at::TensorOptions().dtype(at::kLong).device(device)) {}

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
    const std::vector<int64_t> words = encode(builder.build());
    const at::Tensor lengths = gather(at::full({1}, static_cast<int64_t>(words.size()), at::kLong));
    const int64_t longest = lengths.max().item<int64_t>();
    at::Tensor mine = at::zeros({longest}, at::kLong);
    std::memcpy(mine.data_ptr(), words.data(), words.size() * sizeof(int64_t));
    const at::Tensor all = gather(mine);
    std::vector<CollectiveCall> all_calls;
    for (int rank = 0; rank < getSize(); ++rank)
      all_calls.push_back(decode(all.const_data_ptr<int64_t>() + rank * longest));
    comm::make_plan(all_calls, ranks_, plan_);
    return forward(*inner_);
  }
  comm::CallBuilder::Content content() const override { return comm::CallBuilder::Content::sizes; }

  at::Tensor gather(const at::Tensor& mine) {
    at::Tensor input = mine.to(options_.device());
    at::Tensor output = at::empty({getSize() * mine.numel()}, options_);
    const Blocking blocking;
    const Wait wait(ranks_[getRank()], [this] {
      return c10::str("to compare its next collective with those of ranks ", c10::IntArrayRef(ranks_));
    });
    inner_->_allgather_base(output, input)->wait();
    return output.cpu();
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
