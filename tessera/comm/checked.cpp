#include <tessera/comm/agreement.h>
#include <tessera/comm/blocking.h>
#include <tessera/comm/call_backend.h>
#include <tessera/comm/called.h>
#include <tessera/comm/checked.h>
#include <tessera/comm/waits.h>
#include <tessera/comm/within.h>
#include <tessera/error.h>

#include <algorithm>
#include <bit>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace tessera {

using comm::Buffer;
using comm::Collective;
using comm::CollectiveCall;

namespace {

/// A call as numbers, without the data: fixed fields, then the buffers, then the texts, a letter in each.
std::vector<int64_t> encode(const CollectiveCall& call) {
  const std::string text = describe(call);
  std::vector<int64_t> words{static_cast<int64_t>(call.kind),
                             call.joined,
                             call.root,
                             static_cast<int64_t>(call.op),
                             std::bit_cast<int64_t>(call.factor),
                             static_cast<int64_t>(call.in.size()),
                             static_cast<int64_t>(call.out.size()),
                             static_cast<int64_t>(call.asked.kind),
                             static_cast<int64_t>(text.size()),
                             static_cast<int64_t>(call.asked.call.size()),
                             static_cast<int64_t>(call.asked.refusal.size())};
  for (const auto* buffers : {&call.in, &call.out}) {
    for (const Buffer& buffer : *buffers) {
      words.insert(words.end(), {buffer.elements, static_cast<int64_t>(buffer.dtype),
                                 std::bit_cast<int64_t>(buffer.shape)});
    }
  }
  for (const std::string* each : {&text, &call.asked.call, &call.asked.refusal})
    words.insert(words.end(), each->begin(), each->end());
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
  call.asked.kind = static_cast<comm::ErrorKind>(*words++);
  call.text.resize(*words++);
  call.asked.call.resize(*words++);
  call.asked.refusal.resize(*words++);
  for (auto* buffers : {&call.in, &call.out}) {
    for (Buffer& buffer : *buffers) {
      buffer.elements = *words++;
      buffer.dtype = static_cast<c10::ScalarType>(*words++);
      buffer.shape = std::bit_cast<uint64_t>(*words++);
    }
  }
  for (std::string* text : {&call.text, &call.asked.call, &call.asked.refusal}) {
    for (char& letter : *text) letter = static_cast<char>(*words++);
  }
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
    std::vector<int64_t> words = encode(call);
    words.insert(words.begin(), static_cast<int64_t>(words.size()) + 1);
    words.resize(std::max(words.size(), kFirstWords));
    std::vector<int64_t> all = gather(words, kFirstWords);
    size_t longest = kFirstWords;
    for (size_t i = 0; i < all.size(); i += kFirstWords)
      longest = std::max(longest, static_cast<size_t>(all[i]));
    if (longest > kFirstWords) {
      words.resize(longest);
      all = gather(words, longest);
    }
    std::vector<CollectiveCall> all_calls;
    for (int rank = 0; rank < getSize(); ++rank) all_calls.push_back(decode(&all[rank * longest + 1]));
    comm::make_plan(all_calls, ranks_, plan_);
  }

  /// Most calls fit into as many words, and need one all-gather.
  static constexpr size_t kFirstWords = 256;

  /// The first `count` words of each rank, one after the other.
  std::vector<int64_t> gather(std::vector<int64_t>& words, size_t count) {
    at::Tensor input =
        at::from_blob(words.data(), {static_cast<int64_t>(count)}, at::kLong).to(options_.device());
    at::Tensor output = at::empty({getSize() * input.numel()}, options_);
    const Blocking blocking;
    const Wait wait(ranks_[getRank()], [this] {
      return c10::str("to compare its next collective with those of ranks ", c10::IntArrayRef(ranks_));
    });
    inner_->_allgather_base(output, input)->wait();
    output = output.cpu();
    const auto* data = output.const_data_ptr<int64_t>();
    return {data, data + output.numel()};
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
