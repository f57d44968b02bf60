#include <tessera/comm/blocking_work.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/shm/backend.h>
#include <tessera/comm/staged.h>
#include <tessera/comm/threads/backend.h>

#include <utility>
#include <vector>

#include <ATen/ops/empty_like.h>

namespace tessera::comm {

namespace {

/// (a tensor of the device, the one of the host that has its new values)
using StagedPairs = std::vector<std::pair<at::Tensor, at::Tensor>>;

void copy_staged_back(StagedPairs& pairs) {
  const at::AutoDispatchBelowAutograd below_autograd;
  for (auto& [given, written] : pairs) given.copy_(written);
  pairs.clear();
}

class StagedWork final : public BlockingWork {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  StagedWork(Work work, c10d::OpType type, StagedPairs pairs)
      : BlockingWork(-1, type, firsts(pairs)), work_(std::move(work)), pairs_(std::move(pairs)) {}

  int sourceRank() const override { return work_->sourceRank(); }
  StagedParts parts() {
    return {work_, [pairs = std::exchange(pairs_, {})]() mutable { copy_staged_back(pairs); }};
  }

 protected:
  void complete(std::chrono::milliseconds timeout) override {
    work_->wait(timeout);
    copy_staged_back(pairs_);
  }
  bool is_ready() override { return work_->isCompleted(); }

 private:
  static Tensors firsts(const StagedPairs& pairs) {
    Tensors all;
    for (const auto& [given, written] : pairs) all.push_back(given);
    return all;
  }

  const Work work_;
  StagedPairs pairs_;
};

/// The tensors of one call on the host. Those of the CPU are what they were.
class Staging {
 public:
  at::Tensor in(const at::Tensor& tensor) const {
    const at::AutoDispatchBelowAutograd below_autograd;
    return is_on_host(tensor) ? tensor : tensor.cpu();
  }
  at::Tensor out(const at::Tensor& tensor) {
    return is_on_host(tensor) ? tensor : written(tensor, empty(tensor));
  }
  at::Tensor in_out(const at::Tensor& tensor) {
    return is_on_host(tensor) ? tensor : written(tensor, in(tensor));
  }

  Tensors in(const Tensors& tensors) const {
    return each(tensors, [&](const auto& t) { return in(t); });
  }
  Tensors out(const Tensors& tensors) {
    return each(tensors, [&](const auto& t) { return out(t); });
  }
  Tensors in_out(const Tensors& tensors) {
    return each(tensors, [&](const auto& t) { return in_out(t); });
  }
  std::vector<Tensors> in(const std::vector<Tensors>& lists) const {
    return each(lists, [&](const auto& list) { return in(list); });
  }
  std::vector<Tensors> out(const std::vector<Tensors>& lists) {
    return each(lists, [&](const auto& list) { return out(list); });
  }

  StagedPairs take_pairs() { return std::move(pairs_); }

 private:
  static bool is_on_host(const at::Tensor& tensor) { return !tensor.defined() || tensor.is_cpu(); }
  static at::Tensor empty(const at::Tensor& tensor) {
    const at::AutoDispatchBelowAutograd below_autograd;
    return at::empty_like(tensor, tensor.options().device(at::kCPU));
  }
  at::Tensor written(const at::Tensor& given, at::Tensor host) {
    pairs_.emplace_back(given, host);
    return host;
  }
  template <class T, class F>
  static std::vector<T> each(const std::vector<T>& items, const F& staged) {
    std::vector<T> result;
    result.reserve(items.size());
    for (const T& item : items) result.push_back(staged(item));
    return result;
  }

  StagedPairs pairs_;
};

class StagedBackend final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  explicit StagedBackend(c10::intrusive_ptr<c10d::Backend> carrier)
      : c10d::Backend(carrier->getRank(), carrier->getSize()), carrier_(std::move(carrier)) {}

  const c10::intrusive_ptr<c10d::Backend>& carrier() const { return carrier_; }

  const std::string getBackendName() const override { return carrier_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return carrier_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { carrier_->setTimeout(timeout); }
  void abort() override { carrier_->abort(); }
  void shutdown() override { carrier_->shutdown(); }
  void setSequenceNumberForGroup() override { carrier_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return carrier_->getSequenceNumberForGroup(); }

  bool supportsCoalescing() const override { return carrier_->supportsCoalescing(); }
  void startCoalescing() override {
    carrier_->startCoalescing();
    coalescing_ = true;
  }
  Work endCoalescing() override {
    coalescing_ = false;
    return finished(carrier_->endCoalescing(), c10d::OpType::COALESCED, std::exchange(coalesced_, {}));
  }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return staged(c10d::OpType::BROADCAST, [&](Staging& host) {
      Tensors all = host.in_out(tensors);
      return carrier_->broadcast(all, opts);
    });
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return staged(c10d::OpType::ALLREDUCE, [&](Staging& host) {
      Tensors all = host.in_out(tensors);
      return carrier_->allreduce(all, opts);
    });
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return staged(c10d::OpType::ALLREDUCE_COALESCED, [&](Staging& host) {
      Tensors all = host.in_out(tensors);
      return carrier_->allreduce_coalesced(all, opts);
    });
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return staged(c10d::OpType::REDUCE, [&](Staging& host) {
      Tensors all = host.in_out(tensors);
      return carrier_->reduce(all, opts);
    });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& opts) override {
    return staged(c10d::OpType::ALLGATHER, [&](Staging& host) {
      Tensors in = host.in(inputs);
      std::vector<Tensors> out = host.out(outputs);
      return carrier_->allgather(out, in, opts);
    });
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return staged(c10d::OpType::_ALLGATHER_BASE, [&](Staging& host) {
      at::Tensor in = host.in(input), out = host.out(output);
      return carrier_->_allgather_base(out, in, opts);
    });
  }
  Work allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& opts) override {
    return staged(c10d::OpType::ALLGATHER_COALESCED, [&](Staging& host) {
      Tensors in = host.in(inputs);
      std::vector<Tensors> out = host.out(outputs);
      return carrier_->allgather_coalesced(out, in, opts);
    });
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& opts) override {
    return staged(c10d::OpType::ALLGATHER_COALESCED, [&](Staging& host) {
      Tensors in = host.in(inputs), out = host.out(outputs);
      return carrier_->allgather_into_tensor_coalesced(out, in, opts);
    });
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return staged(c10d::OpType::GATHER, [&](Staging& host) {
      Tensors in = host.in(inputs);
      std::vector<Tensors> out = host.out(outputs);
      return carrier_->gather(out, in, opts);
    });
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    return staged(c10d::OpType::SCATTER, [&](Staging& host) {
      std::vector<Tensors> in = host.in(inputs);
      Tensors out = host.out(outputs);
      return carrier_->scatter(out, in, opts);
    });
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& opts) override {
    return staged(c10d::OpType::REDUCE_SCATTER, [&](Staging& host) {
      std::vector<Tensors> in = host.in(inputs);
      Tensors out = host.out(outputs);
      return carrier_->reduce_scatter(out, in, opts);
    });
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& opts) override {
    return staged(c10d::OpType::_REDUCE_SCATTER_BASE, [&](Staging& host) {
      at::Tensor in = host.in(input), out = host.out(output);
      return carrier_->_reduce_scatter_base(out, in, opts);
    });
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& opts) override {
    return staged(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, [&](Staging& host) {
      Tensors in = host.in(inputs), out = host.out(outputs);
      return carrier_->reduce_scatter_tensor_coalesced(out, in, opts);
    });
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return staged(c10d::OpType::ALLTOALL_BASE, [&](Staging& host) {
      at::Tensor in = host.in(input), out = host.out(output);
      return carrier_->alltoall_base(out, in, output_splits, input_splits, opts);
    });
  }
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return staged(c10d::OpType::ALLTOALL, [&](Staging& host) {
      Tensors in = host.in(inputs), out = host.out(outputs);
      return carrier_->alltoall(out, in, opts);
    });
  }
  Work barrier(const c10d::BarrierOptions& opts) override { return carrier_->barrier(opts); }

  Work send(Tensors& tensors, int to, int tag) override {
    return staged(c10d::OpType::SEND, [&](Staging& host) {
      Tensors all = host.in(tensors);
      return carrier_->send(all, to, tag);
    });
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    return staged(c10d::OpType::RECV, [&](Staging& host) {
      Tensors all = host.out(tensors);
      return carrier_->recv(all, from, tag);
    });
  }
  Work recvAnysource(Tensors& tensors, int tag) override {
    return staged(c10d::OpType::RECVANYSOURCE, [&](Staging& host) {
      Tensors all = host.out(tensors);
      return carrier_->recvAnysource(all, tag);
    });
  }

 private:
  template <class Call>
  Work staged(c10d::OpType type, const Call& call) {
    Staging host;
    Work work = call(host);
    return finished(std::move(work), type, host.take_pairs());
  }

  /// While calls are coalesced, what they wrote is there after the work of all of them.
  Work finished(Work work, c10d::OpType type, StagedPairs pairs) {
    if (pairs.empty()) return work;
    if (coalescing_) {
      coalesced_.insert(coalesced_.end(), pairs.begin(), pairs.end());
      return work;
    }
    return c10::make_intrusive<StagedWork>(std::move(work), type, std::move(pairs));
  }

  const c10::intrusive_ptr<c10d::Backend> carrier_;
  bool coalescing_ = false;
  StagedPairs coalesced_;
};

}  // namespace

bool carries(const std::string& backend, c10::DeviceType device) {
  if (device == c10::DeviceType::CPU || device == c10::DeviceType::Meta) return true;
  if (backend == "gloo") return device == c10::DeviceType::CUDA;  // it copies to the host by itself
  return backend != threads::kBackendName && backend != shm::kBackendName;
}

c10::intrusive_ptr<c10d::Backend> make_staged(c10::intrusive_ptr<c10d::Backend> carrier) {
  return c10::make_intrusive<StagedBackend>(std::move(carrier));
}

c10::intrusive_ptr<c10d::Backend> carrier_of(c10::intrusive_ptr<c10d::Backend> backend) {
  const auto* staged = dynamic_cast<const StagedBackend*>(backend.get());
  return staged ? staged->carrier() : backend;
}

StagedParts parts_of(c10::intrusive_ptr<c10d::Work> work) {
  auto* staged = dynamic_cast<StagedWork*>(work.get());
  return staged ? staged->parts() : StagedParts{std::move(work), {}};
}

}  // namespace tessera::comm
