#include <tessera/comm/agreement.h>
#include <tessera/comm/blocking.h>
#include <tessera/comm/blocking_work.h>
#include <tessera/comm/called.h>
#include <tessera/comm/collectives.h>
#include <tessera/comm/hierarchical.h>
#include <tessera/comm/joined.h>
#include <tessera/comm/observer.h>
#include <tessera/comm/posting.h>
#include <tessera/comm/process_rank.h>
#include <tessera/comm/reduction.h>
#include <tessera/comm/shm/backend.h>
#include <tessera/comm/staged.h>
#include <tessera/comm/threads/backend.h>
#include <tessera/comm/waits.h>
#include <tessera/error.h>
#include <tessera/span.h>
#include <tessera/thread_scope.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera::comm {

namespace {

using c10d::ReduceOp;
using Backend = c10::intrusive_ptr<c10d::Backend>;

/// The group's default one; torch.distributed gives a group none if its backends were named by device, as "cpu:shm".
Backend default_backend(const Group& group) {
  const bool has_one = group->getBackendType() != c10d::ProcessGroup::BackendType::UNDEFINED;
  return has_one ? group->getDefaultBackend() : group->getBackend(at::kCPU);
}

/// Whether its ranks are processes: of custom backends, that holds for two of ours.
bool is_of_processes(const Group& group) {
  if (!group) return false;
  if (group->getBackendType() != c10d::ProcessGroup::BackendType::CUSTOM) return true;
  const std::string name = group->getDefaultBackend()->getBackendName();
  return name == shm::kBackendName || name == hierarchical::kBackendName;
}

/// The backend of the group for where `tensor` is.
Backend backend_of(const Group& group, const at::Tensor& tensor) {
  TESSERA_CHECK_VALUE(group, "A collective was called on no group.");
  TESSERA_CHECK_VALUE(tensor.defined(),
                      "A collective was given an undefined tensor; pass one of zero elements instead.");
  const auto device = tensor.device().type();
  const bool is_custom = group->getBackendType() == c10d::ProcessGroup::BackendType::CUSTOM;
  const auto check_alive = [&](bool is_alive) {
    TESSERA_CHECK(
        is_alive,
        "The group of this collective has ended with its world (destroy_process_group). Make meshes "
        "and tensors anew.");
  };
  check_alive(group->getStore() || is_custom);
  try {
    return group->getBackend(device);
  } catch (const c10::Error&) {
    check_alive(group->getStore() || !group->hasBackendForDeviceType(device));
    throw;
  }
}

/// Whether the backend takes what we take. All others are transports, which take less.
bool takes_all(const Backend& backend) {
  const std::string name = backend->getBackendName();
  return name == threads::kBackendName || name == shm::kBackendName || name == "fake";
}

/// The tensor's values as bytes: its memory, or that of a copy if it is not plain.
at::Tensor bytes_of(const at::Tensor& tensor) { return plain(tensor).view({-1}).view(at::kByte); }

/// Where a transport is to write what `tensor` shall hold, and the copy that may be needed after.
struct Landing {
  explicit Landing(const at::Tensor& tensor)
      : given(tensor),
        dense(is_plain(tensor) ? tensor : at::empty_like(tensor, at::MemoryFormat::Contiguous)) {}
  at::Tensor bytes() const { return bytes_of(dense); }
  void finish() const {
    if (!dense.is_same(given)) given.copy_(dense);
  }
  at::Tensor given, dense;
};

void check_size(const Tensors& tensors, const Group& group, const char* what) {
  TESSERA_CHECK_VALUE(static_cast<int>(tensors.size()) == group->getSize(), what,
                      ": needs one tensor for each of the ", group->getSize(), " ranks of the group, got ",
                      tensors.size(), ".");
}

void check_reduction(const at::Tensor& tensor, const ReduceOp& op, const char* what) {
  TESSERA_CHECK_VALUE(can_reduce(tensor.scalar_type(), op.op_), what, ": there is no reduction ",
                      name(op.op_), " of ", tensor.scalar_type(), " values.");
}

/// target = op(parts[0], parts[1], ...), in this order.
void reduce_locally(const at::Tensor& target, const Tensors& parts, const ReduceOp& op) {
  if (target.numel() == 0) return;
  CallBuilder factor(Collective::all_reduce, CallBuilder::Content::data);
  const double premul = factor.reduction(op).build().factor;
  const bool in_place = target.is_cpu() && is_plain(target);
  const at::Tensor dense = in_place ? target : at::empty(target.sizes(), target.options().device(at::kCPU));
  Tensors here;  // on the host
  std::vector<std::byte*> sources;
  for (const at::Tensor& part : parts) {
    here.push_back(part.cpu());
    sources.push_back(static_cast<std::byte*>(here.back().data_ptr()));
  }
  std::byte* out = static_cast<std::byte*>(dense.data_ptr());
  reduce_values(target.scalar_type(), op.op_, premul, sources.data(), static_cast<int64_t>(sources.size()),
                &out, 1, 0, target.numel());
  if (!dense.is_same(target)) target.copy_(dense);
}

void exchange_agreed(const Agreement& agreement, const Tensors& outputs, const Tensors& inputs) {
  const std::vector<Landing> landings(outputs.begin(), outputs.end());
  Tensors in, out;
  for (const at::Tensor& input : inputs) in.push_back(bytes_of(input));
  for (const Landing& landing : landings) out.push_back(landing.bytes());
  agreement.exchange(out, in);
  for (const Landing& landing : landings) landing.finish();
}

/// On a transport: each rank sends inputs[r] to rank r; sizes may differ and be zero.
Pending exchange(const Tensors& outputs, const Tensors& inputs, const Group& group, const Backend& backend,
                 std::function<void()> finish = {}) {
  if (const Agreement* agreement = Agreement::open(group)) {
    if (agreement->can_exchange(inputs[0])) {
      exchange_agreed(*agreement, outputs, inputs);
      if (finish) finish();
      return Pending(group, {});
    }
    agreement->settle_before_data();
  }
  auto flat = [](const Tensors& tensors, std::vector<int64_t>& sizes) {
    int64_t total = 0;
    for (const at::Tensor& tensor : tensors) {
      sizes.push_back(static_cast<int64_t>(tensor.nbytes()));
      total += sizes.back();
    }
    return at::empty({total}, tensors[0].options().dtype(at::kByte));
  };
  std::vector<int64_t> in_sizes, out_sizes;
  at::Tensor in = flat(inputs, in_sizes);
  at::Tensor out = flat(outputs, out_sizes);
  int64_t offset = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    in.narrow(0, offset, in_sizes[i]).copy_(bytes_of(inputs[i]));
    offset += in_sizes[i];
  }
  auto out_splits = out_sizes;  // gloo keeps the vectors it is given, so they come back empty
  auto work = backend->alltoall_base(out, in, out_splits, in_sizes);
  return Pending(group, std::move(work), [=, finish = std::move(finish)] {
    int64_t start = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Landing landing(outputs[i]);
      landing.bytes().copy_(out.narrow(0, start, out_sizes[i]));
      landing.finish();
      start += out_sizes[i];
    }
    if (finish) finish();
  });
}

at::Tensor nothing_like(const at::Tensor& tensor) { return at::empty({0}, tensor.options()); }

bool even(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const auto& t) { return t.numel() == tensors[0].numel(); });
}

int64_t bytes(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

int64_t bytes(const Tensors& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += bytes(tensor);
  return sum;
}

const at::Tensor* first_of(const at::Tensor& tensor) { return &tensor; }
const at::Tensor* first_of(const Tensors& tensors) { return tensors.empty() ? nullptr : &tensors[0]; }

/// While alive, the calling thread is in a call of this name. Notifies observers of it, not of those that it is made of.
class Observed {
 public:
  template <class Given, class Got>
  Observed(const char* name, const Given& given, const Got& got, const Group& group)
      : name_(name), tensor_(first_of(given)), group_(group) {
    SpanObserver* const spans = SpanObserver::innermost();
    if (scope_.outer() || (!Observer::innermost() && !spans)) [[likely]]
      return;
    const Event event{name, std::max(bytes(given), bytes(got)), group, WhileAgreeing::is_alive()};
    for (Observer* each = Observer::innermost(); each; each = each->outer()) each->called(event);
    if (spans) span_.emplace(spans, SpanKind::collective, name, &event);
  }

  /// The outermost one of the calling thread: what the caller called. Null if there is none.
  static const Observed* outermost() { return Scope::current(); }

  const char* name() const { return name_; }
  /// What it is about, or null.
  const at::Tensor* tensor() const { return tensor_; }
  const Group& group() const { return group_; }
  /// In the record of a rank that is a process: a call may be made of several.
  mutable uint64_t recorded = 0;

 private:
  using Scope = ThreadScope<const Observed*, Observed>;
  const char* const name_;
  const at::Tensor* const tensor_;
  const Group& group_;
  const Scope scope_{Scope::current() ? Scope::current() : this};
  std::optional<Span> span_;
};

/// Whether it is the error of calls that do not fit together, which all ranks have, and not one of the transport.
bool is_of_calls(const std::exception& error, const Group& group) {
  return !dynamic_cast<const PeerError*>(&error) && takes_all(default_backend(group));
}

/// A call of the rank on this group begins, or another part of the call that the calling thread is in: its number in the record.
uint64_t begin_in_record(const ProcessRank::Maker& maker, const Group& group) {
  CallRecord& record = maker.rank->record();
  const Observed* call = Observed::outermost();
  if (call && call->recorded) {
    record.join(call->recorded);
    return call->recorded;
  }
  const uint64_t id = record.begin(call ? call->name() : "collective", call ? call->tensor() : nullptr, group,
                                   maker.members, maker.label);
  if (call) call->recorded = id;
  return id;
}

/// The backend of a group that moves lists.
Backend list_backend(const Group& group, const Tensors& tensors, const char* what) {
  TESSERA_CHECK_VALUE(!tensors.empty(), what, ": needs at least one tensor.");
  Backend backend = backend_of(group, tensors[0]);
  TESSERA_CHECK_VALUE(takes_all(backend), what, ": ", backend->getBackendName(),
                      " does not move several tensors at once (moves_lists). Pack them into one.");
  return backend;
}

CallBuilder sizes_in(Collective kind) { return CallBuilder(kind, CallBuilder::Content::sizes); }

}  // namespace

Pending::Pending(Group group, c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish)
    : group_(std::move(group)), work_(std::move(work)), finish_(std::move(finish)) {
  // Who waits for a transport has to see its own work.
  auto parts = parts_of(work_);
  if (parts.finish) {
    work_ = std::move(parts.work);
    finish_ = [first = std::move(parts.finish), then = std::move(finish_)] {
      first();
      if (then) then();
    };
  }
  const Span span(SpanKind::posted, "posted", work_.get());
  if (!work_ || !is_of_processes(group_)) return;
  auto maker = ProcessRank::maker_of(group_);
  if (!maker.rank) return;
  call_ = begin_in_record(maker, group_);
  rank_ = std::move(maker.rank);
  members_ = std::move(maker.members);
}

c10::intrusive_ptr<c10d::Work> post_message(const Group& group,
                                            c10::function_ref<c10::intrusive_ptr<c10d::Work>()> post) {
  try {
    return post();
  } catch (const c10::Error&) {
    throw;  // of arguments
  } catch (const std::exception&) {
    const auto maker = ProcessRank::maker_of(group);
    if (!maker.rank) throw;
    Agreement::count_shared_error();
    const Observed* call = Observed::outermost();
    const uint64_t id = maker.rank->record().begin(call ? call->name() : "a message", nullptr, group,
                                                   maker.members, maker.label);
    maker.rank->rethrow(std::current_exception(), id, maker.members);
  }
}

void wait_in_call(const c10::intrusive_ptr<c10d::Work>& work,
                  const c10::intrusive_ptr<c10d::Backend>& backend) {
  const Observed* call = Observed::outermost();
  const auto maker =
      call && is_of_processes(call->group()) ? ProcessRank::maker_of(call->group()) : ProcessRank::Maker();
  if (!maker.rank) {
    work->wait();
    return;
  }
  const uint64_t id = begin_in_record(maker, call->group());
  try {
    maker.rank->wait_for(work, [&] { return backend; });
  } catch (const std::exception&) {
    maker.rank->rethrow(std::current_exception(), id, maker.members);
  }
  maker.rank->record().end(id);
}

Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&& other) noexcept {
  if (this == &other) return *this;
  forget();
  group_ = std::move(other.group_);
  work_ = std::move(other.work_);
  finish_ = std::move(other.finish_);
  rank_ = std::move(other.rank_);
  members_ = std::move(other.members_);
  call_ = other.call_;
  return *this;
}
Pending::~Pending() { forget(); }

void Pending::forget() noexcept {
  if (work_ && rank_) rank_->record().end(call_);
}

void Pending::wait() {
  if (!work_) return;
  const Span span(SpanKind::wait, "wait", work_.get());
  const auto work = std::exchange(work_, {});
  try {
    const Blocking blocking;
    // What is done, or can be at once, is not worth being reported as a wait. That of ranks that are threads knows more.
    if (!rank_ || work->isCompleted()) {
      work->wait();
    } else {
      const Wait reported(
          rank_->rank(), [rank = rank_, call = call_] { return "in " + rank->record().describe(call); },
          rank_.get(),
          [rank = rank_, members = members_] {
            const auto monitor = rank->monitor();
            return monitor ? ". Of the ranks of its group:" + monitor->ask(members, std::chrono::seconds(1))
                           : "";
          });
      rank_->wait_for(work, [this] { return group_->getBackend(at::kCPU); });
    }
  } catch (const std::exception& error) {
    Agreement::count_shared_error();
    if (rank_ && is_of_calls(error, group_)) rank_->record().end(call_);
    if (!rank_ || is_of_calls(error, group_)) throw;
    rank_->rethrow(std::current_exception(), call_, members_);
  }
  if (rank_) rank_->record().end(call_);
  if (finish_) {
    const at::NoGradGuard no_grad;
    std::exchange(finish_, {})();
  }
}

Pending all_reduce(const at::Tensor& tensor, const ReduceOp& op, const Group& group) {
  const Observed observed("all_reduce", tensor, tensor, group);
  const Called called([&] { return sizes_in(Collective::all_reduce).reduction(op).in_out(tensor).build(); });
  const auto backend = backend_of(group, tensor);
  Tensors tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  if (takes_all(backend)) return Pending(group, backend->allreduce(tensors, options));

  const at::NoGradGuard no_grad;
  check_reduction(tensor, op, "all_reduce");
  const Landing landing(tensor);
  if (!is_plain(tensor)) landing.dense.copy_(tensor);
  const bool as_real = tensor.is_complex() && (op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG);
  const bool averages = op.op_ == ReduceOp::AVG && (tensor.is_floating_point() || tensor.is_complex());
  at::Tensor carrier = as_real ? at::view_as_real(landing.dense) : landing.dense;
  if (averages) options.reduceOp = ReduceOp::SUM;
  if (transport_reduces(carrier.scalar_type(), options.reduceOp.op_)) {
    if (tensor.numel() == 0) return barrier(group);
    tensors = {carrier};
    return Pending(group, backend->allreduce(tensors, options), [=] {
      if (averages) landing.dense.div_(group->getSize());
      landing.finish();
    });
  }
  Tensors parts;
  for (int i = 0; i < group->getSize(); ++i) parts.push_back(at::empty_like(landing.dense));
  return exchange(parts, Tensors(parts.size(), landing.dense), group, backend,
                  [=] { reduce_locally(tensor, parts, op); });
}

Pending all_gather(const Tensors& outputs, const at::Tensor& input, const Group& group) {
  const Observed observed("all_gather", input, outputs, group);
  const Called called([&] { return sizes_in(Collective::all_gather).in(input).out(outputs).build(); });
  const auto backend = backend_of(group, input);
  check_size(outputs, group, "all_gather");
  std::vector<Tensors> lists{outputs};
  Tensors inputs{input};
  if (takes_all(backend)) return Pending(group, backend->allgather(lists, inputs));
  const at::NoGradGuard no_grad;
  if (even(outputs) && outputs[0].numel() > 0) {
    std::vector<Landing> landings(outputs.begin(), outputs.end());
    lists[0].clear();
    for (const Landing& landing : landings) lists[0].push_back(landing.bytes());
    inputs = {bytes_of(input)};
    return Pending(group, backend->allgather(lists, inputs), [landings] {
      for (const Landing& landing : landings) landing.finish();
    });
  }
  return exchange(outputs, Tensors(outputs.size(), input), group, backend);
}

Pending all_gather_into(const at::Tensor& output, const at::Tensor& input, const Group& group) {
  const Observed observed("all_gather", input, output, group);
  const Called called(
      [&] { return sizes_in(Collective::all_gather).joined().in(input).out(output).build(); });
  const auto backend = backend_of(group, input);
  at::Tensor out = output, in = input;
  if (takes_all(backend)) return Pending(group, backend->_allgather_base(out, in));
  TESSERA_CHECK_VALUE(
      output.numel() == input.numel() * group->getSize() && output.scalar_type() == input.scalar_type(),
      "all_gather_into: the output, ", output.scalar_type(), output.sizes(),
      ", has no room for exactly the inputs of ", group->getSize(), " ranks, ", input.scalar_type(),
      input.sizes(), " each.");
  const at::NoGradGuard no_grad;
  if (input.numel() == 0) return barrier(group);
  const Landing landing(output);
  in = bytes_of(input);
  out = landing.bytes();
  return Pending(group, backend->_allgather_base(out, in), [landing] { landing.finish(); });
}

Pending reduce_scatter(const at::Tensor& output, const Tensors& inputs, const ReduceOp& op,
                       const Group& group) {
  const Observed observed("reduce_scatter", inputs, output, group);
  const Called called(
      [&] { return sizes_in(Collective::reduce_scatter).reduction(op).in(inputs).out(output).build(); });
  const auto backend = backend_of(group, output);
  check_size(inputs, group, "reduce_scatter");
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  if (takes_all(backend)) {
    Tensors outputs{output};
    std::vector<Tensors> lists{inputs};
    return Pending(group, backend->reduce_scatter(outputs, lists, options));
  }
  const at::NoGradGuard no_grad;
  check_reduction(output, op, "reduce_scatter");
  if (even(inputs) && transport_reduces(output.scalar_type(), op.op_)) {
    Tensors flat;
    for (const at::Tensor& input : inputs) flat.push_back(input.reshape({-1}));
    return reduce_scatter_from(output, joined(flat), op, group);
  }
  Tensors parts;
  for (size_t i = 0; i < inputs.size(); ++i)
    parts.push_back(at::empty_like(output, at::MemoryFormat::Contiguous));
  return exchange(parts, inputs, group, backend, [=] { reduce_locally(output, parts, op); });
}

Pending reduce_scatter_from(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op,
                            const Group& group) {
  const Observed observed("reduce_scatter", input, output, group);
  const Called called([&] {
    return sizes_in(Collective::reduce_scatter).reduction(op).joined().in(input).out(output).build();
  });
  const auto backend = backend_of(group, output);
  at::Tensor out = output, in = input;
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  if (takes_all(backend)) return Pending(group, backend->_reduce_scatter_base(out, in, options));
  TESSERA_CHECK_VALUE(input.numel() == output.numel() * group->getSize(),
                      "reduce_scatter_from: the input, of shape ", input.sizes(),
                      ", does not have one part for each of ", group->getSize(), " ranks, of shape ",
                      output.sizes(), ".");
  const at::NoGradGuard no_grad;
  if (output.numel() == 0) return barrier(group);
  const at::Tensor flat = plain(input).view({-1});
  if (!transport_reduces(output.scalar_type(), op.op_))
    return reduce_scatter(output, flat.split(output.numel()), op, group);
  const Landing landing(output);
  out = landing.dense.view({-1});
  in = flat;
  return Pending(group, backend->_reduce_scatter_base(out, in, options), [landing] { landing.finish(); });
}

bool moves_lists(const Group& group) {
  const auto devices = group->getDeviceTypes();
  return !devices.empty() && std::all_of(devices.begin(), devices.end(), [&](const c10::Device& device) {
    return takes_all(group->getBackend(device.type()));
  });
}

Pending all_gather_into(const Tensors& outputs, const Tensors& inputs, const Group& group) {
  const Observed observed("all_gather", inputs, outputs, group);
  const Called called(
      [&] { return sizes_in(Collective::all_gather).joined().in(inputs).out(outputs).build(); });
  const auto backend = list_backend(group, inputs, "all_gather_into");
  Tensors outs = outputs, ins = inputs;
  return Pending(group, backend->allgather_into_tensor_coalesced(outs, ins));
}

Pending reduce_scatter_from(const Tensors& outputs, const Tensors& inputs, const ReduceOp& op,
                            const Group& group) {
  const Observed observed("reduce_scatter", inputs, outputs, group);
  const Called called([&] {
    return sizes_in(Collective::reduce_scatter).reduction(op).joined().in(inputs).out(outputs).build();
  });
  const auto backend = list_backend(group, inputs, "reduce_scatter_from");
  Tensors outs = outputs, ins = inputs;
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  return Pending(group, backend->reduce_scatter_tensor_coalesced(outs, ins, options));
}

Pending all_to_all(const Tensors& outputs, const Tensors& inputs, const Group& group) {
  const Observed observed("all_to_all", inputs, outputs, group);
  const Called called([&] { return sizes_in(Collective::all_to_all).in(inputs).out(outputs).build(); });
  check_size(outputs, group, "all_to_all");
  check_size(inputs, group, "all_to_all");
  const auto backend = backend_of(group, inputs[0]);
  Tensors outs = outputs, ins = inputs;
  if (takes_all(backend)) return Pending(group, backend->alltoall(outs, ins));
  const at::NoGradGuard no_grad;
  return exchange(outputs, inputs, group, backend);
}

Pending broadcast(const at::Tensor& tensor, int64_t root, const Group& group) {
  const Observed observed("broadcast", tensor, tensor, group);
  const Called called([&] { return sizes_in(Collective::broadcast).root(root).in_out(tensor).build(); });
  const auto backend = backend_of(group, tensor);
  c10d::BroadcastOptions options;
  options.rootRank = root;
  Tensors tensors{tensor};
  if (takes_all(backend)) return Pending(group, backend->broadcast(tensors, options));
  const at::NoGradGuard no_grad;
  if (tensor.numel() == 0) return barrier(group);
  const Landing landing(tensor);
  if (group->getRank() == root && !is_plain(tensor)) landing.dense.copy_(tensor);
  tensors = {landing.bytes()};
  return Pending(group, backend->broadcast(tensors, options), [landing] { landing.finish(); });
}

Pending reduce(const at::Tensor& tensor, const ReduceOp& op, int64_t root, const Group& group) {
  const Observed observed("reduce", tensor, tensor, group);
  const Called called(
      [&] { return sizes_in(Collective::reduce).root(root).reduction(op).in_out(tensor).build(); });
  const auto backend = backend_of(group, tensor);
  if (takes_all(backend)) {
    c10d::ReduceOptions options;
    options.reduceOp = op;
    options.rootRank = root;
    Tensors tensors{tensor};
    return Pending(group, backend->reduce(tensors, options));
  }
  const at::NoGradGuard no_grad;
  check_reduction(tensor, op, "reduce");
  const bool is_root = group->getRank() == root;
  Tensors parts;
  for (int i = 0; i < group->getSize(); ++i) {
    parts.push_back(is_root ? at::empty_like(tensor, at::MemoryFormat::Contiguous) : nothing_like(tensor));
  }
  Tensors inputs(parts.size(), nothing_like(tensor));
  inputs.at(root) = tensor;
  return exchange(parts, inputs, group, backend, [=] {
    if (is_root) reduce_locally(tensor, parts, op);
  });
}

Pending gather(const Tensors& outputs, const at::Tensor& input, int64_t root, const Group& group) {
  const Observed observed("gather", input, outputs, group);
  const Called called([&] { return sizes_in(Collective::gather).root(root).in(input).out(outputs).build(); });
  const auto backend = backend_of(group, input);
  const bool is_root = group->getRank() == root;
  if (is_root) check_size(outputs, group, "gather");
  if (takes_all(backend)) {
    c10d::GatherOptions options;
    options.rootRank = root;
    std::vector<Tensors> lists;
    if (is_root) lists.push_back(outputs);
    Tensors inputs{input};
    return Pending(group, backend->gather(lists, inputs, options));
  }
  const at::NoGradGuard no_grad;
  Tensors inputs(group->getSize(), nothing_like(input));
  inputs.at(root) = input;
  return exchange(is_root ? outputs : Tensors(group->getSize(), nothing_like(input)), inputs, group, backend);
}

Pending scatter(const at::Tensor& output, const Tensors& inputs, int64_t root, const Group& group) {
  const Observed observed("scatter", inputs, output, group);
  const Called called(
      [&] { return sizes_in(Collective::scatter).root(root).in(inputs).out(output).build(); });
  const auto backend = backend_of(group, output);
  const bool is_root = group->getRank() == root;
  if (is_root) check_size(inputs, group, "scatter");
  if (takes_all(backend)) {
    c10d::ScatterOptions options;
    options.rootRank = root;
    std::vector<Tensors> lists;
    if (is_root) lists.push_back(inputs);
    Tensors outputs{output};
    return Pending(group, backend->scatter(outputs, lists, options));
  }
  const at::NoGradGuard no_grad;
  Tensors outputs(group->getSize(), nothing_like(output));
  outputs.at(root) = output;
  return exchange(outputs, is_root ? inputs : Tensors(group->getSize(), nothing_like(output)), group,
                  backend);
}

Pending barrier(const Group& group) {
  const Observed observed("barrier", Tensors(), Tensors(), group);
  const Called called([&] { return sizes_in(Collective::barrier).build(); });
  TESSERA_CHECK_VALUE(group, "barrier: was called on no group.");
  return Pending(group, default_backend(group)->barrier());
}

Pending send(const at::Tensor& tensor, int64_t to, const Group& group, int tag) {
  const Observed observed("send", tensor, tensor, group);
  const auto backend = backend_of(group, tensor);
  Tensors tensors{takes_all(backend) ? tensor : bytes_of(tensor)};
  return Pending(group,
                 post_message(group, [&] { return backend->send(tensors, static_cast<int>(to), tag); }));
}

Pending recv(const at::Tensor& tensor, int64_t from, const Group& group, int tag) {
  const Observed observed("recv", tensor, tensor, group);
  const auto backend = backend_of(group, tensor);
  Tensors tensors{tensor};
  if (takes_all(backend)) return Pending(group, backend->recv(tensors, static_cast<int>(from), tag));
  const at::NoGradGuard no_grad;
  const Landing landing(tensor);
  tensors = {landing.bytes()};
  return Pending(group,
                 post_message(group, [&] { return backend->recv(tensors, static_cast<int>(from), tag); }),
                 [landing] { landing.finish(); });
}

}  // namespace tessera::comm
