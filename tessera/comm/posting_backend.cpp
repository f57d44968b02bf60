#include <tessera/comm/agreement.h>
#include <tessera/comm/blocking_work.h>
#include <tessera/comm/posting_backend.h>
#include <tessera/comm/reduction.h>
#include <tessera/comm/within.h>
#include <tessera/error.h>

#include <utility>

#include <ATen/ops/empty.h>

namespace tessera {

using c10d::OpType;
using comm::CallBuilder;
using comm::CollectiveCall;
using std::chrono::milliseconds;

namespace {

class CollectiveWork final : public comm::BlockingWork {
 public:
  struct What {
    comm::Collective kind;
    c10d::ReduceOp::RedOpType op;
    int64_t root;
  };

  CollectiveWork(std::shared_ptr<Poster> poster, int rank, uint64_t number, milliseconds timeout, OpType type,
                 What what, std::vector<at::Tensor> results, CallBuilder::CopyBack copy_back)
      : comm::BlockingWork(rank, type, std::move(results)),
        poster_(std::move(poster)),
        number_(number),
        timeout_(timeout),
        what_(what),
        copy_back_(std::move(copy_back)) {}

  uint64_t getSequencenumber() const override { return number_; }

 protected:
  void complete(milliseconds timeout) override {
    poster_->wait(number_, timeout == kNoTimeout ? timeout_ : timeout, [this] {
      CollectiveCall call;
      call.kind = what_.kind;
      call.op = what_.op;
      call.root = what_.root;
      for (const at::Tensor& tensor : result()) call.tensors.push_back(tensor);
      return describe(call);
    });
    at::AutoDispatchBelowAutograd below_autograd;
    for (auto& [given, written] : copy_back_) given.copy_(written);
    copy_back_.clear();
  }
  bool is_ready() override { return poster_->poll(number_); }

 private:
  const std::shared_ptr<Poster> poster_;
  const uint64_t number_;
  const milliseconds timeout_;
  const What what_;
  CallBuilder::CopyBack copy_back_;
};

class MessageWork final : public comm::BlockingWork {
 public:
  /// `given` is what to copy the received tensor into, if it was received elsewhere.
  MessageWork(std::shared_ptr<Poster> poster, std::shared_ptr<comm::Parcel> parcel, bool sending, OpType type,
              milliseconds timeout, at::Tensor given)
      : comm::BlockingWork(static_cast<int>(sending ? parcel->from : parcel->to), type, {given}),
        poster_(std::move(poster)),
        parcel_(std::move(parcel)),
        sending_(sending),
        timeout_(timeout),
        given_(std::move(given)) {}

  int sourceRank() const override { return static_cast<int>(parcel_->source); }

 protected:
  void complete(milliseconds timeout) override {
    const bool is_final = timeout == kNoTimeout;
    poster_->wait(parcel_, sending_, is_final ? timeout_ : timeout, is_final);
    at::AutoDispatchBelowAutograd below_autograd;
    if (!sending_ && !given_.is_same(parcel_->tensor)) given_.copy_(parcel_->tensor);
  }
  bool is_ready() override { return poster_->poll(*parcel_); }

 private:
  const std::shared_ptr<Poster> poster_;
  const std::shared_ptr<comm::Parcel> parcel_;
  const bool sending_;
  const milliseconds timeout_;
  at::Tensor given_;
};

}  // namespace

PostingBackend::PostingBackend(std::string name, std::shared_ptr<Poster> poster, int64_t member, int64_t size,
                               milliseconds timeout)
    : CallBackend(static_cast<int>(member), static_cast<int>(size)),
      name_(std::move(name)),
      poster_(std::move(poster)),
      timeout_(timeout) {}

PostingBackend::~PostingBackend() { poster_->leave(); }

c10::intrusive_ptr<c10d::Backend::Options> PostingBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(name_, timeout_);
}

void PostingBackend::check_dense_cpu(const at::Tensor& tensor, const char* what) const {
  TESSERA_CHECK_VALUE(tensor.layout() == at::kStrided, what, ": needs dense tensors, but one has layout ",
                      tensor.layout(), ".");
  TESSERA_CHECK_VALUE(tensor.device().is_cpu(), what, ": the backend \"", name_,
                      "\" carries CPU tensors, but one is on ", tensor.device(),
                      ". Make the mesh or group for that device, so that its own backend is used.");
}

PostingBackend::Work PostingBackend::submit(CallBuilder& builder, OpType type, Tensors results,
                                            milliseconds timeout, Forward /*forward*/) {
  CollectiveCall call = builder.build();
  call.asked = comm::Agreement::asked(*this);
  call.within = comm::Within::current();
  for (const at::Tensor& tensor : call.tensors) check_dense_cpu(tensor, comm::name(call.kind));
  if (call.op != c10d::ReduceOp::UNUSED) {
    for (const comm::Buffer& buffer : call.in) {
      TESSERA_CHECK_VALUE(comm::can_reduce(buffer.dtype, call.op), describe(call), ": there is no reduction ",
                          comm::name(call.op), " of ", buffer.dtype, " values.");
    }
  }
  if (timeout == c10d::kUnsetTimeout || timeout == kNoTimeout) timeout = timeout_;
  const CollectiveWork::What what{call.kind, call.op, call.root};
  const uint64_t number = poster_->post(std::move(call), timeout);
  last_ = number;
  return track(c10::make_intrusive<CollectiveWork>(poster_, getRank(), number, timeout, type, what,
                                                   std::move(results), builder.take_copy_back()));
}

PostingBackend::Work PostingBackend::track(Work work) {
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

void PostingBackend::startCoalescing() {
  TESSERA_CHECK(!coalescing_, "startCoalescing: the calls are being coalesced already; end that first.");
  coalescing_ = true;
}

PostingBackend::Work PostingBackend::endCoalescing() {
  TESSERA_CHECK(coalescing_, "endCoalescing: there was no startCoalescing.");
  coalescing_ = false;
  return c10::make_intrusive<comm::AllOfWork>(getRank(), std::exchange(coalesced_, {}));
}

const at::Tensor& PostingBackend::checked_message(const Tensors& tensors, const char* what,
                                                  int64_t peer) const {
  TESSERA_CHECK_VALUE(tensors.size() == 1 && tensors[0].defined(), what, ": takes one tensor, got ",
                      tensors.size(), ".");
  TESSERA_CHECK_VALUE(peer >= comm::kAnySource && peer < getSize(), what, ": ", peer,
                      " is not a rank of this group of ", getSize(), ".");
  TESSERA_CHECK_VALUE(peer != getRank(), what, ": rank ", peer, " cannot exchange messages with itself.");
  check_dense_cpu(tensors[0], what);
  return tensors[0];
}

PostingBackend::Work PostingBackend::send(Tensors& tensors, int to, int tag) {
  TESSERA_CHECK_VALUE(to >= 0, "send: ", to, " is not a rank.");
  const at::Tensor& tensor = checked_message(tensors, "send", to);
  auto parcel = poster_->send(to, tag, comm::plain(tensor));
  return track(
      c10::make_intrusive<MessageWork>(poster_, std::move(parcel), true, OpType::SEND, timeout_, tensor));
}

PostingBackend::Work PostingBackend::recv(Tensors& tensors, int from, int tag) {
  TESSERA_CHECK_VALUE(from >= 0, "recv: ", from, " is not a rank.");
  return receive(tensors, from, tag, OpType::RECV);
}

PostingBackend::Work PostingBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, comm::kAnySource, tag, OpType::RECVANYSOURCE);
}

PostingBackend::Work PostingBackend::receive(const Tensors& tensors, int64_t from, int tag, OpType type) {
  const at::Tensor& tensor = checked_message(tensors, "recv", from);
  const at::Tensor place = comm::is_plain(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options());
  auto parcel = poster_->receive(from, tag, place);
  return track(c10::make_intrusive<MessageWork>(poster_, std::move(parcel), false, type, timeout_, tensor));
}

}  // namespace tessera
