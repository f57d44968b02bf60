#include <tessera/comm/agreement.h>
#include <tessera/comm/threads/backend.h>
#include <tessera/comm/threads/kernels.h>
#include <tessera/comm/within.h>
#include <tessera/error.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::threads {

using c10d::OpType;
using comm::Buffer;
using comm::CallBuilder;
using comm::Collective;
using std::chrono::milliseconds;

namespace {

/// Work that can be waited for from several threads, and is then finished once: done, or failed with an
/// error.
class BlockingWork : public c10d::Work {
 public:
  BlockingWork(int rank, OpType type, std::vector<at::Tensor> results)
      : c10d::Work(rank, type), results_(std::move(results)) {}

  bool wait(milliseconds timeout) override {
    std::lock_guard lock(waiting_);
    if (!isFinished()) {
      try {
        complete(timeout);
        finish();
      } catch (...) {
        finish(std::current_exception());
      }
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  bool isCompleted() override { return isFinished() || is_ready(); }
  bool isSuccess() const override { return isFinished() && !exception_; }
  std::exception_ptr exception() const override { return isFinished() ? exception_ : nullptr; }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }

  /// Carries the work out first: there is no thread of ours that could complete the future later.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    try {
      wait(kNoTimeout);
      future->markCompleted(c10::IValue(results_));
    } catch (...) {
      future->setError(std::current_exception());
    }
    return future;
  }

 protected:
  virtual void complete(milliseconds timeout) = 0;
  virtual bool is_ready() = 0;

 private:
  bool isFinished() const {
    std::lock_guard lock(mutex_);
    return completed_;
  }

  std::mutex waiting_;
  std::vector<at::Tensor> results_;
};

class CollectiveWork final : public BlockingWork {
 public:
  struct What {
    Collective kind;
    c10d::ReduceOp::RedOpType op;
    int64_t root;
  };

  CollectiveWork(std::shared_ptr<MeetingPoint> point, int64_t member, uint64_t number, milliseconds timeout,
                 OpType type, What what, std::vector<at::Tensor> results, CallBuilder::CopyBack copy_back)
      : BlockingWork(static_cast<int>(member), type, std::move(results)),
        point_(std::move(point)),
        member_(member),
        number_(number),
        timeout_(timeout),
        what_(what),
        copy_back_(std::move(copy_back)) {}

  uint64_t getSequencenumber() const override { return number_; }

 protected:
  void complete(milliseconds timeout) override {
    point_->collectives.wait(member_, number_, timeout == kNoTimeout ? timeout_ : timeout, [this] {
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
  bool is_ready() override { return point_->collectives.poll(number_); }

 private:
  const std::shared_ptr<MeetingPoint> point_;
  const int64_t member_;
  const uint64_t number_;
  const milliseconds timeout_;
  const What what_;
  CallBuilder::CopyBack copy_back_;
};

class MessageWork final : public BlockingWork {
 public:
  /// `given` is what to copy the received tensor into, if it was received elsewhere.
  MessageWork(std::shared_ptr<MeetingPoint> point, std::shared_ptr<Parcel> parcel, bool sending, OpType type,
              milliseconds timeout, at::Tensor given)
      : BlockingWork(static_cast<int>(sending ? parcel->from : parcel->to), type, {given}),
        point_(std::move(point)),
        parcel_(std::move(parcel)),
        sending_(sending),
        timeout_(timeout),
        given_(std::move(given)) {}

  int sourceRank() const override { return static_cast<int>(parcel_->source); }

 protected:
  void complete(milliseconds timeout) override {
    const bool is_final = timeout == kNoTimeout;
    point_->mailbox.wait(parcel_, sending_, is_final ? timeout_ : timeout, is_final);
    at::AutoDispatchBelowAutograd below_autograd;
    if (!sending_ && !given_.is_same(parcel_->tensor)) given_.copy_(parcel_->tensor);
  }
  bool is_ready() override { return parcel_->state != Parcel::waiting; }

 private:
  const std::shared_ptr<MeetingPoint> point_;
  const std::shared_ptr<Parcel> parcel_;
  const bool sending_;
  const milliseconds timeout_;
  at::Tensor given_;
};

class AllOf final : public BlockingWork {
 public:
  AllOf(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : BlockingWork(rank, OpType::COALESCED, {}), works_(std::move(works)) {}

 protected:
  void complete(milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
  }
  bool is_ready() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

void check_dense_cpu(const at::Tensor& tensor, const char* what) {
  TESSERA_CHECK_VALUE(tensor.layout() == at::kStrided, what, ": needs dense tensors, but one has layout ",
                      tensor.layout(), ".");
  TESSERA_CHECK_VALUE(tensor.device().is_cpu(), what,
                      ": the backend of ranks that are threads carries CPU tensors, but one is on ",
                      tensor.device(),
                      ". Make the mesh or group for that device, so that its own backend is used.");
}

const at::Tensor& check_message(const std::vector<at::Tensor>& tensors, const char* what, int64_t peer,
                                int rank, int size) {
  TESSERA_CHECK_VALUE(tensors.size() == 1 && tensors[0].defined(), what, ": takes one tensor, got ",
                      tensors.size(), ".");
  TESSERA_CHECK_VALUE(peer >= kAnySource && peer < size, what, ": ", peer, " is not a rank of this group of ",
                      size, ".");
  TESSERA_CHECK_VALUE(peer != rank, what, ": rank ", peer, " cannot exchange messages with itself.");
  check_dense_cpu(tensors[0], what);
  return tensors[0];
}

}  // namespace

ThreadsBackend::ThreadsBackend(std::shared_ptr<MeetingPoint> point, int64_t member, milliseconds timeout)
    : CallBackend(static_cast<int>(member), static_cast<int>(point->collectives.members().size())),
      point_(std::move(point)),
      member_(member),
      timeout_(timeout) {}

c10::intrusive_ptr<c10d::Backend::Options> ThreadsBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(kBackendName, timeout_);
}

void ThreadsBackend::abort() {
  point_->collectives.abort(c10::str("rank ", point_->collectives.members()[member_], " aborted the group"));
}

ThreadsBackend::Work ThreadsBackend::submit(CallBuilder& builder, OpType type, Tensors results,
                                            milliseconds timeout, Forward /*forward*/) {
  CollectiveCall call = builder.build();
  call.asked = comm::Agreement::asked(*this);
  call.within = comm::Within::current();
  for (const at::Tensor& tensor : call.tensors) check_dense_cpu(tensor, comm::name(call.kind));
  if (call.op != c10d::ReduceOp::UNUSED) {
    for (const Buffer& buffer : call.in) {
      TESSERA_CHECK_VALUE(can_reduce(buffer.dtype, call.op), describe(call), ": there is no reduction ",
                          comm::name(call.op), " of ", buffer.dtype, " values.");
    }
  }
  if (timeout == c10d::kUnsetTimeout || timeout == kNoTimeout) timeout = timeout_;
  const CollectiveWork::What what{call.kind, call.op, call.root};
  last_ = point_->collectives.post(member_, std::move(call), timeout);
  return track(c10::make_intrusive<CollectiveWork>(point_, member_, last_, timeout, type, what,
                                                   std::move(results), builder.take_copy_back()));
}

ThreadsBackend::Work ThreadsBackend::track(Work work) {
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

void ThreadsBackend::startCoalescing() {
  TESSERA_CHECK(!coalescing_, "startCoalescing: the calls are being coalesced already; end that first.");
  coalescing_ = true;
}

ThreadsBackend::Work ThreadsBackend::endCoalescing() {
  TESSERA_CHECK(coalescing_, "endCoalescing: there was no startCoalescing.");
  coalescing_ = false;
  return c10::make_intrusive<AllOf>(getRank(), std::exchange(coalesced_, {}));
}

ThreadsBackend::Work ThreadsBackend::send(Tensors& tensors, int to, int tag) {
  TESSERA_CHECK_VALUE(to >= 0, "send: ", to, " is not a rank.");
  const at::Tensor& tensor = check_message(tensors, "send", to, getRank(), getSize());
  auto parcel = point_->mailbox.send(member_, to, tag, comm::plain(tensor));
  return track(
      c10::make_intrusive<MessageWork>(point_, std::move(parcel), true, OpType::SEND, timeout_, tensor));
}

ThreadsBackend::Work ThreadsBackend::recv(Tensors& tensors, int from, int tag) {
  TESSERA_CHECK_VALUE(from >= 0, "recv: ", from, " is not a rank.");
  return receive(tensors, from, tag, OpType::RECV);
}

ThreadsBackend::Work ThreadsBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, kAnySource, tag, OpType::RECVANYSOURCE);
}

ThreadsBackend::Work ThreadsBackend::receive(const Tensors& tensors, int64_t from, int tag, OpType type) {
  const at::Tensor& tensor = check_message(tensors, "recv", from, getRank(), getSize());
  const at::Tensor place = comm::is_plain(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options());
  auto parcel = point_->mailbox.receive(member_, from, tag, place);
  return track(c10::make_intrusive<MessageWork>(point_, std::move(parcel), false, type, timeout_, tensor));
}

}  // namespace tessera::threads
