#include <tessera/comm/world.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/dtensor/dtensor.h>
#include <tessera/error.h>
#include <tessera/nn/gathered_parameters.h>
#include <tessera/nn/shard_unit.h>
#include <tessera/nn/unit_schedule.h>

#include <algorithm>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera {

namespace {

/// What a parameter knows of its unit. The module owns the unit.
struct UnitLink {
  std::weak_ptr<ShardUnit> unit;
  size_t index;
};

/// Whatever is under way on this thread: what is gathered is no part of it.
struct Apart {
  const c10::InferenceMode normal{false};  // first: it turns gradients on
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
};

/// The tensor on the mesh dims that fully_shard leaves alone; undefined if there are none, or none with names.
Spec inner_spec(const Spec& gathered, const ShardDims& dims) {
  const DeviceMesh& mesh = gathered.mesh();
  DeviceMesh::Names names;
  Placements placements;
  for (const int64_t i : c10::irange(mesh.ndim())) {
    if (dims.has(i) || mesh.mesh_dim_names().empty()) continue;
    names.push_back(mesh.mesh_dim_names()[i]);
    placements.push_back(gathered.placement(i));
  }
  if (names.empty()) return {};
  return Spec(mesh[names], placements, gathered.shape(), gathered.strides(), gathered.dtype());
}

/// A dense tensor in the order of its memory, where `dim` is shared.
Packing::Item item_of(const Spec& gathered, int64_t dim) {
  Packing::Item item{1, gathered.local_shape()[dim], 1, gathered.dtype()};
  bool before = true;
  for (const int64_t each : outer_to_inner(gathered.strides())) {
    if (each == dim) {
      before = false;
    } else {
      (before ? item.outer : item.inner) *= gathered.local_shape()[each];
    }
  }
  return item;
}

}  // namespace

/// The gradients of a unit's gathered parameters, on their way to the sharded ones.
class ShardUnit::Backward final : public torch::autograd::Node {
 public:
  Backward(std::shared_ptr<ShardUnit> unit, uint64_t sequence_nr, bool local)
      : Node(sequence_nr), is_local(local), unit_(std::move(unit)) {}

  std::string name() const override { return "FullyShardBackward"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    std::vector<bool> trained;
    for (const size_t i : c10::irange(gradients.size())) trained.push_back(should_compute_output(i));
    return unit_->reduced(std::move(gradients), is_local, trained);
  }

  const bool is_local;

 private:
  const std::shared_ptr<ShardUnit> unit_;
};

std::shared_ptr<ShardUnit> ShardUnit::make(std::vector<Parameter> parameters, ShardDims dims,
                                           const Options& options) {
  const std::shared_ptr<ShardUnit> unit(new ShardUnit(std::move(parameters), std::move(dims), options));
  unit->schedule_ = std::make_shared<UnitSchedule>();
  unit->schedule_->add(unit);
  if (options.post_forward_ranks) unit->neighbours_ = unit->neighbours();
  unit->describe();
  return unit;
}

ShardUnit::ShardUnit(std::vector<Parameter> parameters, ShardDims dims, const Options& options)
    : parameters_(std::move(parameters)), dims_(std::move(dims)), options_(options) {}

ShardUnit::~ShardUnit() = default;

void ShardUnit::adopt(ShardUnit& inner) {
  if (!inner.outer_.expired()) return;
  inner.outer_ = weak_from_this();
  if (inner.schedule_ != schedule_) schedule_->take_units_of(*std::shared_ptr(inner.schedule_));
}

void ShardUnit::set_parameters(const std::vector<at::Tensor>& tensors) {
  TESSERA_CHECK_VALUE(tensors.size() == parameters_.size(), "fully_shard: a unit of ", parameters_.size(),
                      " parameters was given ", tensors.size(), " others.");
  for (const size_t i : c10::irange(tensors.size())) {
    DTensorImpl::of(parameters_[i].tensor)->set_unit(nullptr);
    parameters_[i].tensor = tensors[i];
  }
  describe();
}

void ShardUnit::describe() {
  if (gathered_) std::exchange(gathered_, nullptr)->free();
  layouts_.clear();
  gathered_bytes_ = 0;
  // What neighbours keep for backward is packed.
  const bool moves_lists = dims_.shards() > 1 && !options_.post_forward_ranks &&
                           comm::moves_lists(dims_.mesh.get_group(MeshDim(dims_.shard)));
  std::vector<Packing::Item> items;
  int64_t offset = 0;
  for (const size_t i : c10::irange(parameters_.size())) {
    DTensorImpl& impl = *DTensorImpl::of(parameters_[i].tensor);
    impl.set_unit(std::make_shared<UnitLink>(UnitLink{weak_from_this(), i}));
    const Spec& sharded = impl.spec();
    const ShardDims dims = dims_.on(sharded.mesh());
    Placements placements = sharded.placements();
    const Placement placement = std::exchange(placements[dims.shard], Replicate());
    const bool casts = options_.mp_policy.param_dtype && at::isFloatingType(sharded.dtype());
    Layout layout;
    layout.sharded = sharded;
    layout.gathered = Spec(sharded.mesh(), placements, sharded.shape(), sharded.strides(),
                           casts ? *options_.mp_policy.param_dtype : sharded.dtype());
    layout.inner = inner_spec(layout.gathered, dims);
    if (placement.is_shard()) {
      layout.item = item_of(layout.gathered, placement.dim());
      const bool is_direct = moves_lists && layout.gathered.dtype() == sharded.dtype() &&
                             layout.item->outer == 1 && layout.item->size % dims_.shards() == 0;
      if (!is_direct) {
        layout.packed = items.size();
        items.push_back(*layout.item);
      }
    }
    layout.offset = offset;
    layout.bytes = static_cast<int64_t>(c10::elementSize(layout.gathered.dtype()));
    for (const int64_t size : layout.gathered.local_shape()) layout.bytes *= size;
    gathered_bytes_ = offset + layout.bytes;
    offset = aligned(offset + layout.bytes);
    layouts_.push_back(std::move(layout));
  }
  packing_.emplace(std::move(items), dims_.shards());
  if (unreduced_local_)
    TORCH_WARN(
        "fully_shard: parameters were replaced while gradients of them were kept, not reduced: these are "
        "dropped. "
        "Call a backward that reduces them first (set_requires_gradient_sync).");
  unreduced_local_.reset();
  unreduced_.clear();
  unreduced_.resize(parameters_.size());
}

std::pair<std::shared_ptr<ShardUnit>, size_t> ShardUnit::of(const at::Tensor& parameter) {
  const DTensorImpl* impl = parameter.defined() ? DTensorImpl::of(parameter) : nullptr;
  if (!impl || !impl->unit()) return {};
  const auto& link = *static_cast<const UnitLink*>(impl->unit().get());
  return {link.unit.lock(), link.index};
}

std::vector<uint64_t> ShardUnit::state() const {
  std::vector<uint64_t> state;
  for (const Parameter& parameter : parameters_) {
    const DTensorImpl& impl = *DTensorImpl::of(parameter.tensor);
    state.push_back(impl.writes());
    state.push_back(impl.takes());
  }
  return state;
}

bool ShardUnit::has_state(const std::vector<uint64_t>& state) const {
  auto known = state.begin();
  for (const Parameter& parameter : parameters_) {
    const DTensorImpl& impl = *DTensorImpl::of(parameter.tensor);
    if (*known++ != impl.writes() || *known++ != impl.takes()) return false;
  }
  return true;
}

bool ShardUnit::gives(bool uses_weight) const {
  if (schedule_->is_in_forward()) return true;
  if (options_.only_in_forward) return false;
  if (at::GradMode::is_enabled() || uses_weight) return true;
  // At no cost; but an optimizer does not compute in the dtype of the model.
  return is_gathered() && !options_.mp_policy.param_dtype;
}

at::Tensor ShardUnit::gathered(size_t index) {
  unshard();
  at::Tensor result;
  {
    const Apart apart;
    result = gathered_->tensor(index, schedule_->is_local()).variable_data();
  }
  if (at::GradMode::is_enabled() && parameters_[index].tensor.requires_grad())
    torch::autograd::impl::set_gradient_edge(result, {node(), static_cast<uint32_t>(index)});
  return result;
}

c10::intrusive_ptr<torch::autograd::Node> ShardUnit::node() {
  const bool local = schedule_->is_local();
  if (auto known = node_.lock(); known && static_cast<const Backward&>(*known).is_local == local)
    return known;
  c10::intrusive_ptr<torch::autograd::Node> node =
      c10::make_intrusive<Backward>(shared_from_this(), sequence_nr_, local);
  torch::autograd::edge_list edges;
  for (const size_t i : c10::irange(parameters_.size())) {
    const at::Tensor& parameter = parameters_[i].tensor;
    if (parameter.requires_grad()) {
      edges.push_back(torch::autograd::impl::gradient_edge(parameter));
      node->add_input_metadata(gathered_->tensor(i, local));
    } else {
      edges.emplace_back();
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
  node->set_next_edges(std::move(edges));
  node_ = node;
  return node;
}

bool ShardUnit::is_gathered() const {
  return parameters_.empty() || (gathered_ && gathered_->is_filled() && gathered_->is_current());
}

void ShardUnit::start() {
  const Apart apart;
  const bool moved = std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& each) {
    return DTensorImpl::of(each.tensor)->spec() != layouts_[&each - parameters_.data()].sharded;
  });
  if (moved) describe();
  if (!gathered_ || !gathered_->is_current()) {
    if (gathered_) gathered_->free();
    gathered_ = std::make_shared<Gathered>(*this);
  }
  gathered_->start();
}

ShardUnit::Neighbours ShardUnit::neighbours() const {
  const int64_t count = *options_.post_forward_ranks;
  const DeviceMesh& mesh = dims_.mesh;
  const int64_t rank = mesh.get_local_rank(MeshDim(dims_.shard));
  std::vector<int64_t> ranks;
  for (const int64_t i : c10::irange(count)) {
    std::vector<int64_t> coordinate = mesh.get_coordinate()->vec();
    coordinate[dims_.shard] = rank / count * count + i;
    int64_t index = 0;
    for (const int64_t dim : c10::irange(mesh.ndim())) index = index * mesh.shape()[dim] + coordinate[dim];
    ranks.push_back(mesh.ranks()[index]);
  }
  return {mesh.world()->group(ranks, mesh.device_type()), count, rank % count};
}

void ShardUnit::unshard() {
  if (is_gathered()) return;
  schedule_->begin(*this);
  const bool for_backward = at::GradMode::is_enabled() && !UnitSchedule::is_in_backward_pass();
  start();
  {
    const Apart apart;
    gathered_->fill(for_backward);
  }
  node_.reset();
  // Below that of all that is computed with the parameters: the engine runs the node after all of it.
  sequence_nr_ = at::sequence_number::get_and_increment();
  schedule_->prefetch_after(*this);
}

void ShardUnit::reshard() {
  release();
  if (gathered_) gathered_->forget();
}

void ShardUnit::release() {
  if (gathered_) gathered_->free();
}

bool ShardUnit::keeps_after_forward() const {
  return is_in_backward() || !options_.reshard_after_forward.value_or(!outer_.expired());
}

bool ShardUnit::frees_after_backward() const {
  // A backward inside of forward, of a model that computes gradients itself: forward goes on with what is
  // gathered.
  return reshard_after_backward_ && !schedule_->is_in_forward();
}

void ShardUnit::begin_forward(std::optional<bool> local) {
  schedule_->enter_forward(local);
  try {
    unshard();
  } catch (...) {
    schedule_->leave_forward();
    throw;
  }
}

void ShardUnit::end_forward() {
  if (schedule_->is_in_forward()) schedule_->leave_forward();
  if (!keeps_after_forward()) release();
}

void ShardUnit::begin_backward() {
  in_backward_ = schedule_->backward();
  unshard();
}

}  // namespace tessera
