#include <tessera/comm/builtin_backends.h>
#include <tessera/comm/call_backend.h>
#include <tessera/comm/hierarchical.h>
#include <tessera/comm/reduction.h>
#include <tessera/comm/shm/backend.h>
#include <tessera/error.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tessera::hierarchical {

using c10d::ReduceOp;
using comm::Buffer;
using comm::Collective;
using comm::CollectiveCall;

namespace {

using Transport = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

at::Tensor values_of(const Buffer& buffer) {
  return at::from_blob(buffer.data, {buffer.elements}, at::TensorOptions().dtype(buffer.dtype));
}

/// gloo moves bytes of every dtype, if it is told that they are bytes.
at::Tensor bytes_of(const Buffer& buffer) {
  const auto bytes = static_cast<int64_t>(buffer.elements * c10::elementSize(buffer.dtype));
  return at::from_blob(buffer.data, {bytes}, at::kByte);
}

bool gloo_reduces(const CollectiveCall& call) {
  return std::all_of(call.in.begin(), call.in.end(),
                     [&](const Buffer& buffer) { return comm::transport_reduces(buffer.dtype, call.op); });
}

/// Where the members of a group are.
struct Layout {
  explicit Layout(const BackendRequest& request) : size(static_cast<int64_t>(request.ranks.size())) {
    TESSERA_CHECK(
        request.hosts.size() == request.ranks.size(),
        "The \"hierarchical\" backend is for processes on several hosts, and which rank is on which is "
        "not known here. Use \"shm\" or \"gloo\".");
    for (int64_t member = 0; member < size; ++member) {
      const auto host = static_cast<size_t>(request.hosts[member]);
      if (host >= members.size()) members.resize(host + 1);
      if (member == request.member) {
        own = request.hosts[member];
        index = static_cast<int64_t>(members[host].size());
      }
      members[host].push_back(member);
    }
    for (const auto& on_host : members) most = std::max(most, static_cast<int64_t>(on_host.size()));
    for (int64_t host = 0; host < hosts(); ++host) {
      for (int64_t i = 0; i < most; ++i)
        is_regular = is_regular && i < count(host) && members[host][i] == host * most + i;
    }
  }

  int64_t hosts() const { return static_cast<int64_t>(members.size()); }
  int64_t count(int64_t host) const { return static_cast<int64_t>(members[host].size()); }
  bool leads() const { return index == 0; }
  bool alone() const { return count(own) == 1; }

  const int64_t size;
  std::vector<std::vector<int64_t>> members;  // of each host, in the order of the group
  int64_t own = 0, index = 0;                 // this member's host, and which of its members this one is
  int64_t most = 0;                           // on one host
  bool is_regular = true;  // whether all hosts have as many, and the members are numbered host by host
};

/// The collectives of one member, step by step. Where tensors of all members are together, each host has as many slots as
/// the largest one: member i of host h has slot `h * most + i`.
class Steps {
 public:
  /// `within`: null if this member is alone on its host. `between`: null unless it leads.
  Steps(Layout layout, Transport within, Transport between)
      : layout_(std::move(layout)), within_(std::move(within)), between_(std::move(between)) {}

  /// Whether the call goes in steps. Such calls are the same on all ranks.
  bool take(const CollectiveCall& call) const {
    switch (call.kind) {
      case Collective::broadcast:
        return true;
      case Collective::all_reduce:
        return gloo_reduces(call);
      case Collective::all_gather:
        return are_even(call.in, call.out, call.joined);
      case Collective::reduce_scatter:
        return gloo_reduces(call) && are_even(call.out, call.in, call.joined);
      default:
        return false;
    }
  }

  void run(const CollectiveCall& call) {
    try {
      for (size_t i = 0; i < std::min(call.in.size(), call.out.size()); ++i) {
        switch (call.kind) {
          case Collective::broadcast:
            broadcast(bytes_of(call.out[i]), call.root);
            break;
          case Collective::all_reduce:
            all_reduce(values_of(call.out[i]), call.op);
            break;
          case Collective::all_gather:
            all_gather(call, i);
            break;
          default:
            reduce_scatter(call, i);
        }
      }
    } catch (...) {
      abort();  // the others of this host wait for this one
      throw;
    }
  }

  void abort() {
    if (within_) within_->abort();
  }

 private:
  /// Whether each of the `parts`, or each part of what is joined, is as large as the one it goes with.
  bool are_even(c10::ArrayRef<Buffer> ones, c10::ArrayRef<Buffer> parts, bool joined) const {
    const auto per_one = joined ? 1 : static_cast<size_t>(layout_.size);
    if (parts.size() != ones.size() * per_one) return false;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Buffer& one = ones[i / per_one];
      if (parts[i].dtype != one.dtype || parts[i].elements != one.elements * (joined ? layout_.size : 1))
        return false;
    }
    return true;
  }

  void broadcast(const at::Tensor& tensor, int64_t root) {
    int64_t from = 0;
    for (int64_t host = 0; host < layout_.hosts(); ++host) {
      const auto& members = layout_.members[host];
      const auto found = std::find(members.begin(), members.end(), root);
      if (found == members.end()) continue;
      from = host;
      if (host == layout_.own) broadcast_within(tensor, found - members.begin());
    }
    if (between_) {
      Tensors tensors{tensor};
      c10d::BroadcastOptions options;
      options.rootRank = from;
      between_->broadcast(tensors, options)->wait();
    }
    if (from != layout_.own) broadcast_within(tensor, 0);
  }

  void all_reduce(const at::Tensor& tensor, ReduceOp::RedOpType op) {
    reduce_within(tensor, op);
    if (between_) {
      Tensors tensors{tensor};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      between_->allreduce(tensors, options)->wait();
    }
    broadcast_within(tensor, 0);
  }

  void all_gather(const CollectiveCall& call, size_t i) {
    const at::Tensor mine = bytes_of(call.in[i]);
    const int64_t size = mine.numel();
    const bool in_place = call.joined && layout_.is_regular;
    at::Tensor all = in_place ? bytes_of(call.out[i]) : at::empty({slots() * size}, at::kByte);
    at::Tensor of_host = mine;
    if (layout_.leads() && layout_.most > 1) {
      of_host = at::zeros({layout_.most * size}, at::kByte);
      if (!within_) of_host.narrow(0, 0, size).copy_(mine);
    }
    if (within_) {
      Tensors inputs{mine};
      std::vector<Tensors> outputs;
      if (layout_.leads()) outputs.push_back(parts_of_members(of_host, size));
      within_->gather(outputs, inputs, {})->wait();
    }
    if (between_) between_->_allgather_base(all, of_host, {})->wait();
    broadcast_within(all, 0);
    if (in_place) return;
    for_each_member([&](int64_t member, int64_t slot) {
      part_of(call.out, i, call.joined, member, bytes_of).copy_(all.narrow(0, slot * size, size));
    });
  }

  void reduce_scatter(const CollectiveCall& call, size_t i) {
    const at::Tensor mine = values_of(call.out[i]);
    const int64_t size = mine.numel();
    // A reduction writes what its root has; what the others have is only read.
    const bool in_place = call.joined && layout_.is_regular && !layout_.leads();
    at::Tensor all = in_place ? values_of(call.in[i]) : at::zeros({slots() * size}, mine.options());
    if (!in_place) {
      for_each_member([&](int64_t member, int64_t slot) {
        all.narrow(0, slot * size, size).copy_(part_of(call.in, i, call.joined, member, values_of));
      });
    }
    reduce_within(all, call.op);
    at::Tensor of_host;
    if (between_) {
      // gloo would reduce all of it on every host.
      at::Tensor from_hosts = at::empty_like(all), bytes_to = all.view(at::kByte),
                 bytes_from = from_hosts.view(at::kByte);
      std::vector<int64_t> equal_parts;
      between_->alltoall_base(bytes_from, bytes_to, equal_parts, equal_parts, {})->wait();
      of_host = at::empty({layout_.most * size}, mine.options());
      std::vector<std::byte*> sources;
      for (const at::Tensor& part : from_hosts.chunk(layout_.hosts()))
        sources.push_back(static_cast<std::byte*>(part.data_ptr()));
      auto* target = static_cast<std::byte*>(of_host.mutable_data_ptr());
      if (of_host.numel() > 0)
        comm::reduce_values(of_host.scalar_type(), call.op, 1, sources.data(), layout_.hosts(), &target, 1, 0,
                            of_host.numel());
    }
    if (!within_) {
      mine.copy_(of_host.narrow(0, 0, size));
      return;
    }
    Tensors outputs{mine};
    std::vector<Tensors> inputs;
    if (layout_.leads()) inputs.push_back(parts_of_members(of_host, size));
    within_->scatter(outputs, inputs, {})->wait();
  }

  void reduce_within(const at::Tensor& tensor, ReduceOp::RedOpType op) {
    if (!within_) return;
    Tensors tensors{tensor};
    c10d::ReduceOptions options;
    options.reduceOp = op;
    within_->reduce(tensors, options)->wait();
  }

  void broadcast_within(const at::Tensor& tensor, int64_t root) {
    if (!within_) return;
    Tensors tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    within_->broadcast(tensors, options)->wait();
  }

  /// What goes to or comes from the members of this host, in their order.
  Tensors parts_of_members(const at::Tensor& all, int64_t size) const {
    Tensors parts;
    for (int64_t i = 0; i < layout_.count(layout_.own); ++i) parts.push_back(all.narrow(0, i * size, size));
    return parts;
  }

  /// Of tensor `i` of a call, the part of a member, as `view` sees it.
  template <class View>
  at::Tensor part_of(c10::ArrayRef<Buffer> parts, size_t i, bool joined, int64_t member,
                     const View& view) const {
    if (!joined) return view(parts[i * layout_.size + member]);
    const at::Tensor all = view(parts[i]);
    const int64_t size = all.numel() / layout_.size;
    return all.narrow(0, member * size, size);
  }

  int64_t slots() const { return layout_.hosts() * layout_.most; }

  template <class Function>
  void for_each_member(const Function& function) const {
    for (int64_t host = 0; host < layout_.hosts(); ++host) {
      for (int64_t i = 0; i < layout_.count(host); ++i)
        function(layout_.members[host][i], host * layout_.most + i);
    }
  }

  const Layout layout_;
  const Transport within_, between_;
};

/// A collective that the thread of the group carries out.
class SteppedWork final : public c10d::Work {
 public:
  SteppedWork(int rank, c10d::OpType type, Tensors results)
      : c10d::Work(rank, type),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  /// Ends the waits for it.
  void abort() override { end(std::make_exception_ptr(c10::Error("the wait was ended", nullptr))); }

  /// The first end counts.
  void end(std::exception_ptr error) {
    {
      const std::lock_guard lock(ending_);
      if (std::exchange(has_ended_, true)) return;
    }
    finish(error);
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(c10::IValue(results_));
  }

 private:
  const Tensors results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::mutex ending_;
  bool has_ended_ = false;
};

/// Does what is posted, one after the other, on a thread of its own: ranks that wait for something else make progress too. It
/// may be stuck in gloo when the backend ends, so it shares what it needs.
class Worker {
 public:
  struct Job {
    CollectiveCall call;
    comm::CallBuilder::CopyBack copy_back;
    c10::intrusive_ptr<SteppedWork> work;
  };

  explicit Worker(Steps steps) : state_(std::make_shared<State>(std::move(steps))) {
    thread_ = std::thread([state = state_] { state->run(); });
  }
  ~Worker() {
    const bool is_stuck = close(nullptr);
    if (is_stuck)
      thread_.detach();
    else
      thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const Steps& steps() const { return state_->steps; }

  void post(Job job) {
    const std::lock_guard lock(state_->mutex);
    if (state_->error) std::rethrow_exception(state_->error);
    state_->jobs.push_back(std::move(job));
    state_->posted.notify_one();
  }

  void abort() {
    state_->steps.abort();
    close(std::make_exception_ptr(c10::Error("the group was aborted", nullptr)));
  }

 private:
  struct State {
    explicit State(Steps given) : steps(std::move(given)) {}

    void run() {
      const at::AutoDispatchBelowAutograd below_autograd;
      std::unique_lock lock(mutex);
      while (true) {
        posted.wait(lock, [&] { return closed || error || !jobs.empty(); });
        if (jobs.empty() || error) break;
        Job& job = jobs.front();
        lock.unlock();
        std::exception_ptr failure;
        try {
          steps.run(job.call);
          for (auto& [given, written] : job.copy_back) given.copy_(written);
        } catch (...) {
          failure = std::current_exception();
        }
        job.work->end(failure);
        lock.lock();
        jobs.pop_front();
        // What comes next would meet the steps of another collective of the others.
        if (failure && !error) error = failure;
      }
      std::deque<Job> left = std::exchange(jobs, {});
      lock.unlock();
      for (const Job& job : left) job.work->end(error);
    }

    Steps steps;
    std::mutex mutex;
    std::condition_variable posted;
    std::deque<Job> jobs;  // the first one is being carried out
    std::exception_ptr error;
    bool closed = false;
  };

  /// Nothing more is done; what is under way ends with the error, if there is one. Whether the thread still has work to do.
  bool close(std::exception_ptr error) {
    std::vector<c10::intrusive_ptr<SteppedWork>> under_way;
    {
      const std::lock_guard lock(state_->mutex);
      state_->closed = true;
      if (error && !state_->error) state_->error = error;
      for (const Job& job : state_->jobs) under_way.push_back(job.work);
      state_->posted.notify_all();
    }
    if (error) {
      for (const auto& work : under_way) work->end(error);
    }
    return !under_way.empty();
  }

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

class HierarchicalBackend final : public CallBackend {
 public:
  /// `flat` carries everything else.
  HierarchicalBackend(const BackendRequest& request, Steps steps, Transport flat)
      : CallBackend(static_cast<int>(request.member), static_cast<int>(request.ranks.size())),
        flat_(std::move(flat)),
        worker_(std::move(steps)) {}

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return flat_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { flat_->setTimeout(timeout); }
  bool compares() const override { return false; }
  void abort() override { worker_.abort(); }
  void shutdown() override { flat_->shutdown(); }
  void setSequenceNumberForGroup() override { flat_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return flat_->getSequenceNumberForGroup(); }
  Work send(Tensors& tensors, int to, int tag) override { return flat_->send(tensors, to, tag); }
  Work recv(Tensors& tensors, int from, int tag) override { return flat_->recv(tensors, from, tag); }
  Work recvAnysource(Tensors& tensors, int tag) override { return flat_->recvAnysource(tensors, tag); }

 private:
  Work submit(comm::CallBuilder& builder, c10d::OpType type, Tensors results,
              std::chrono::milliseconds /*timeout*/, Forward forward) override {
    CollectiveCall call = builder.build();
    if (!worker_.steps().take(call)) return forward(*flat_);
    auto work = c10::make_intrusive<SteppedWork>(getRank(), type, std::move(results));
    worker_.post({std::move(call), builder.take_copy_back(), work});
    return work;
  }
  comm::CallBuilder::Content content() const override { return comm::CallBuilder::Content::data; }

  const Transport flat_;
  Worker worker_;
};

}  // namespace

Transport make_hierarchical_backend(const BackendRequest& request) {
  TESSERA_CHECK(
      request.store && request.device == at::kCPU,
      "The \"hierarchical\" backend carries CPU tensors, and needs a store through which the processes "
      "find one another.");
  const Layout layout(request);
  /// The part of this group whose members these are.
  const auto part = [&](const std::string& name, const std::string& backend,
                        const std::vector<int64_t>& members) {
    BackendRequest part = request;
    part.name = request.name + "/" + name;
    part.store = c10::make_intrusive<c10d::PrefixStore>(name, request.store);
    part.hosts.clear();
    part.ranks.clear();
    for (const int64_t member : members) {
      if (member == request.member) part.member = static_cast<int64_t>(part.ranks.size());
      part.ranks.push_back(request.ranks[member]);
    }
    return make_backend(backend, part);
  };
  Transport within, between;
  const auto& own = layout.members[layout.own];
  if (!layout.alone()) within = part("host " + std::to_string(layout.own), shm::kBackendName, own);
  if (layout.leads()) {
    std::vector<int64_t> leaders;
    for (const auto& members : layout.members) leaders.push_back(members.front());
    between = part("leaders", "gloo", leaders);
  }
  std::vector<int64_t> all(layout.size);
  std::iota(all.begin(), all.end(), 0);
  return c10::make_intrusive<HierarchicalBackend>(
      request, Steps(layout, std::move(within), std::move(between)), part("flat", "gloo", all));
}

}  // namespace tessera::hierarchical
