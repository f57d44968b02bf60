#include <tessera/comm/observer.h>
#include <tessera/debug/dry_run.h>
#include <tessera/debug/fake_mesh.h>
#include <tessera/debug/meta_kernels.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dispatch/op_plan.h>
#include <tessera/error.h>
#include <tessera/redistribute/plan.h>
#include <tessera/redistribute/plan_text.h>
#include <tessera/span.h>
#include <tessera/thread_scope.h>

#include <algorithm>
#include <array>
#include <iomanip>
#include <map>
#include <mutex>
#include <ostream>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#include <c10/util/irange.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {

namespace {

constexpr size_t kUses = 5;

/// What tensors on meta would take, as they come and go.
class MemoryAccount : public std::enable_shared_from_this<MemoryAccount> {
 public:
  /// One allocation: lives as long as its memory.
  struct Block {
    std::shared_ptr<MemoryAccount> account;
    size_t id;
    ~Block() { account->freed(id); }
  };

  Block* allocated(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const size_t id = blocks_.size();
    blocks_.emplace_back(static_cast<int64_t>(bytes),
                         comm::MemoryInFlight::is_alive() ? MemoryUse::in_flight : use_);
    events_.push_back({id, true});
    return new Block{shared_from_this(), id};
  }

  void set_use(MemoryUse use) {
    const std::lock_guard lock(mutex_);
    use_ = use;
  }
  void set_use(const Block& block, MemoryUse use) {
    const std::lock_guard lock(mutex_);
    blocks_[block.id].second = use;
  }

  void begin() {
    const std::lock_guard lock(mutex_);
    begin_ = events_.size();
  }

  void rename(MemoryUse from, MemoryUse to) {
    const std::lock_guard lock(mutex_);
    for (auto& [bytes, use] : blocks_) {
      if (use == from) use = to;
    }
  }

  /// Since then.
  MemoryOfRank most() const {
    const std::lock_guard lock(mutex_);
    // What an optimizer frees again is no state.
    std::vector<MemoryUse> uses;
    for (const auto& [bytes, use] : blocks_) uses.push_back(use);
    for (const Event& event : events_) {
      if (!event.is_new && uses[event.block] == MemoryUse::optimizer)
        uses[event.block] = MemoryUse::activations;
    }
    std::array<int64_t, kUses> now{}, most{};
    int64_t peak = 0;
    const auto look = [&] {
      int64_t sum = 0;
      for (const size_t use : c10::irange(kUses)) {
        most[use] = std::max(most[use], now[use]);
        sum += now[use];
      }
      peak = std::max(peak, sum);
    };
    for (const size_t i : c10::irange(events_.size())) {
      if (i == begin_) look();
      const int64_t bytes = blocks_[events_[i].block].first;
      now[static_cast<size_t>(uses[events_[i].block])] += events_[i].is_new ? bytes : -bytes;
      if (i >= begin_) look();
    }
    return {most[0], most[1], most[2], most[3], most[4], peak};
  }

 private:
  struct Event {
    size_t block;
    bool is_new;
  };

  void freed(size_t id) {
    const std::lock_guard lock(mutex_);
    events_.push_back({id, false});
  }

  mutable std::mutex mutex_;
  std::vector<std::pair<int64_t, MemoryUse>> blocks_;
  std::vector<Event> events_;
  MemoryUse use_ = MemoryUse::parameters;
  size_t begin_ = 0;
};

using CurrentAccount = ThreadScope<std::shared_ptr<MemoryAccount>, MemoryAccount>;

void free_block(void* block) { delete static_cast<MemoryAccount::Block*>(block); }

/// In the place of libtorch's own for meta: no memory either, but where a dry run wants to know it is counted.
class MetaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto& account = CurrentAccount::current();
    return {nullptr, account ? account->allocated(bytes) : nullptr, &free_block, c10::DeviceType::Meta};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
};

void count_memory_on_meta() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto& allocator = *new MetaAllocator;
    c10::SetAllocator(c10::DeviceType::Meta, &allocator, /*priority=*/1);
  });
}

/// What is counted of the memory of a plain tensor; null if it is not.
const MemoryAccount::Block* block_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const c10::DataPtr& memory = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return memory.get_deleter() == &free_block ? static_cast<const MemoryAccount::Block*>(memory.get_context())
                                             : nullptr;
}

double product(c10::IntArrayRef sizes) {
  double result = 1;
  for (const int64_t size : sizes) result *= static_cast<double>(size);
  return result;
}

/// Of the products of matrices in it, on this rank; as torch.utils.flop_counter counts. 0 for other operators.
double flops_of(const PlannedCall& planned) {
  const OpPlan& plan = planned.plan;
  const std::string& name = planned.info.name;
  if (plan.by_rule && plan.strategy.decompose) return 0;
  const auto shape = [&](size_t tensor) -> c10::DimVector {
    return plan.by_rule ? c10::DimVector(plan.strategy.inputs.at(tensor).local_shape())
                        : c10::DimVector(plan.inputs.at(tensor).shape());
  };
  // [..., m, k] x [..., k, n], where batches are broadcast; vectors have no m, and no n.
  const auto multiplied = [&](size_t first, size_t second) {
    const c10::DimVector a = shape(first), b = shape(second);
    const auto matrices = [](const c10::DimVector& sizes) {
      return sizes.size() > 2 ? product(c10::IntArrayRef(sizes).slice(0, sizes.size() - 2)) : 1.0;
    };
    const double m = a.size() > 1 ? static_cast<double>(a[a.size() - 2]) : 1,
                 k = static_cast<double>(a.back()), n = b.size() > 1 ? static_cast<double>(b.back()) : 1;
    return 2 * std::max(matrices(a), matrices(b)) * m * k * n;
  };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::matmul") return multiplied(0, 1);
  if (name == "aten::addmm" || name == "aten::baddbmm") return multiplied(1, 2);
  if (name == "aten::linear") return 2 * product(shape(0)) * shape(1)[0];
  if (name == "aten::linear_backward") {
    const auto position = *planned.info.schema.argumentIndexWithName("output_mask");
    const auto mask = planned.call.arguments[position].toBoolList();
    return (int{mask[0]} + int{mask[1]}) * 2 * product(shape(0)) * static_cast<double>(shape(1).back());
  }
  if (!name.starts_with("aten::_scaled_dot_product_") || plan.inputs.size() < 3) return 0;
  // Of queries and keys, of weights and values; backward computes the weights again.
  const bool is_backward = name.find("_backward") != std::string::npos;
  const size_t query = is_backward ? 1 : 0;
  const double one = 2 * product(shape(query)) * static_cast<double>(shape(query + 1)[2]);
  return is_backward ? 5 * one : 2 * one;
}

}  // namespace

class DryRun::Recorder final : public comm::Observer, public SpanObserver {
 public:
  Recorder(const Layout& mesh, const DryRunOptions& options)
      : rank_(mesh, options.rank, /*dry_run=*/true),
        account_(std::make_shared<MemoryAccount>()),
        scope_(account_),
        links_(options.cost.of(rank_.mesh())) {}

  const DeviceMesh& mesh() const { return rank_.mesh(); }
  MemoryAccount& account() { return *account_; }

  void begin() {
    collectives_.clear();
    flops_ = 0;
    account_->begin();
  }

  StepCost cost() const {
    StepCost cost;
    cost.mesh = mesh().str();
    cost.rank = mesh().get_rank();
    cost.memory = account_->most();
    cost.flops = flops_;
    for (const auto& [key, collectives] : collectives_) cost.collectives.push_back(collectives);
    return cost;
  }

  void called(const comm::Event& event) override {
    const Along& along = along_of(event.group);
    CollectivesOfStep& sum = collectives_[{along.names, event.name, event.is_agreement}];
    sum.name = event.name;
    sum.is_agreement = event.is_agreement;
    sum.mesh_dims = along.names;
    sum.ranks = event.group->getSize();
    ++sum.calls;
    sum.bytes += event.bytes;
    sum.seconds += collective_cost(event.name, event.bytes, sum.ranks, along.link);
  }

  void began(SpanKind kind, const char* /*name*/, const void* detail) override {
    if (kind == SpanKind::planned) flops_ += flops_of(*static_cast<const PlannedCall*>(detail));
  }
  void ended() override {}

 private:
  /// Where a group lies in the mesh.
  struct Along {
    std::string names;
    LinkCost link;
  };

  const Along& along_of(const Group& group) {
    const auto found = along_.find(group.get());
    if (found != along_.end()) return found->second;
    const auto ranks = mesh().world()->ranks_of(group).value_or(std::vector<int64_t>{mesh().get_rank()});
    const c10::IntArrayRef shape = mesh().shape();
    std::vector<int64_t> dims;
    for (int64_t dim = mesh().ndim() - 1, stride = 1; dim >= 0; stride *= shape[dim--]) {
      const auto coordinate = [&](int64_t rank) { return rank / stride % shape[dim]; };
      if (std::any_of(ranks.begin(), ranks.end(),
                      [&](int64_t rank) { return coordinate(rank) != coordinate(ranks[0]); }))
        dims.insert(dims.begin(), dim);
    }
    std::string names = mesh().world()->name_of(group);
    for (const int64_t dim : names.empty() ? dims : std::vector<int64_t>()) {
      names.append(names.empty() ? "" : "_");
      names.append(mesh().mesh_dim_names().empty() ? c10::str("mesh dim ", dim)
                                                   : mesh().mesh_dim_names()[dim]);
    }
    return along_[group.get()] = {names, joint(links_, dims)};
  }

  const FakeRank rank_;
  const std::shared_ptr<MemoryAccount> account_;
  const CurrentAccount scope_;
  const c10::SmallVector<LinkCost, 4> links_;
  std::map<const c10d::ProcessGroup*, Along> along_;
  std::map<std::tuple<std::string, std::string, bool>, CollectivesOfStep> collectives_;
  double flops_ = 0;
};

DryRun::DryRun(const Layout& mesh, const DryRunOptions& options) {
  register_meta_kernels();
  count_memory_on_meta();
  recorder_ = std::make_unique<Recorder>(mesh, options);
}

DryRun::~DryRun() = default;

const DeviceMesh& DryRun::mesh() const { return recorder_->mesh(); }

void DryRun::set_use(MemoryUse use) { recorder_->account().set_use(use); }

namespace {

/// Parameters and gradients may have been allocated for something else.
void sort_out(MemoryAccount& account, const std::vector<at::Tensor>& parameters) {
  const auto set = [&](const at::Tensor& tensor, MemoryUse use) {
    if (!tensor.defined()) return;
    const DTensorImpl* impl = DTensorImpl::of(tensor);
    const auto* block = block_of(impl ? impl->local() : tensor);
    if (block) account.set_use(*block, use);
  };
  for (const at::Tensor& parameter : parameters) {
    TESSERA_CHECK_VALUE(parameter.is_meta(), "A dry run has no values, but a parameter or buffer of shape ",
                        parameter.sizes(), " is on ", parameter.device(),
                        ". Make the model on meta (OnMeta, torch.device(\"meta\")).");
    set(parameter, MemoryUse::parameters);
    set(parameter.grad(), MemoryUse::gradients);
  }
}

}  // namespace

void DryRun::begin_step(const std::vector<at::Tensor>& parameters) {
  // Batches, say, that were made with the model.
  recorder_->account().rename(MemoryUse::parameters, MemoryUse::activations);
  sort_out(recorder_->account(), parameters);
  set_use(MemoryUse::activations);
  recorder_->begin();
}

StepCost DryRun::end_step(const std::vector<at::Tensor>& parameters) {
  sort_out(recorder_->account(), parameters);
  return recorder_->cost();
}

StepCost plan_model(const Layout& mesh, const std::function<TrainingStep(const DeviceMesh&)>& make,
                    const DryRunOptions& options) {
  DryRun run(mesh, options);
  const TrainingStep training = make(run.mesh());
  const auto step = [&] {
    run.set_use(MemoryUse::activations);
    for (at::Tensor parameter : training.parameters) parameter.mutable_grad().reset();
    training.loss().backward();
    run.set_use(MemoryUse::optimizer);
    if (training.update) training.update();
  };
  step();
  run.begin_step(training.parameters);
  step();
  return run.end_step(training.parameters);
}

int64_t StepCost::bytes() const {
  int64_t sum = 0;
  for (const CollectivesOfStep& each : collectives) sum += each.bytes;
  return sum;
}

double StepCost::communication_seconds() const {
  double sum = 0;
  for (const CollectivesOfStep& each : collectives) sum += each.seconds;
  return sum;
}

std::ostream& operator<<(std::ostream& out, const StepCost& cost) {
  const MemoryOfRank& memory = cost.memory;
  out << "rank " << cost.rank << " of " << cost.mesh << "\n  memory\n";
  const std::pair<const char*, int64_t> uses[] = {
      {"parameters", memory.parameters},   {"gradients", memory.gradients}, {"optimizer", memory.optimizer},
      {"activations", memory.activations}, {"in flight", memory.in_flight}, {"peak", memory.peak}};
  for (const auto& [name, bytes] : uses)
    out << "    " << std::left << std::setw(14) << name << std::right << std::setw(10) << bytes_text(bytes)
        << '\n';
  out << "  communication in a step\n";
  for (const CollectivesOfStep& each : cost.collectives)
    out << "    " << std::left << std::setw(24) << (each.name + (each.is_agreement ? " (to agree)" : ""))
        << std::setw(8) << each.mesh_dims << std::right << std::setw(6) << each.calls << " x" << std::setw(11)
        << bytes_text(each.bytes) << std::setw(11) << seconds_text(each.seconds) << '\n';
  if (cost.collectives.empty()) out << "    none\n";
  return out << "    " << std::left << std::setw(24) << "all" << std::right << std::setw(27)
             << bytes_text(cost.bytes()) << std::setw(11) << seconds_text(cost.communication_seconds())
             << '\n';
}

}  // namespace tessera
