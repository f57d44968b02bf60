#include <tessera/comm/observer.h>
#include <tessera/dispatch/dtensor_impl.h>
#include <tessera/error.h>
#include <tessera/nn/gathered_parameters.h>
#include <tessera/nn/hooks.h>
#include <tessera/redistribute/memory.h>

#include <c10/core/Allocator.h>
#include <c10/util/irange.h>

namespace tessera {

namespace {

/// Dense memory, in the order in which it lies.
at::Tensor flat(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

/// Its bytes.
at::Tensor bytes_of(const at::Tensor& dense) {
  return view_of(dense, dense.storage_offset() * static_cast<int64_t>(dense.element_size()),
                 {static_cast<int64_t>(dense.nbytes())}, {1}, at::kByte);
}

/// The hooks of a weight, and that a Linear casts its input to the weight's dtype: its operator gets the transposed
/// weight, which is no parameter any more.
std::shared_ptr<const void> with_cast(const std::shared_ptr<const void>& hooks, at::ScalarType dtype) {
  const auto known = std::static_pointer_cast<const WeightHooks>(hooks);
  auto result = known ? std::make_shared<WeightHooks>(*known) : std::make_shared<WeightHooks>();
  auto& inputs = result->uses[WeightUse::linear].inputs;
  inputs.insert(inputs.begin(), [dtype](std::vector<at::Tensor>& tensors) {
    for (at::Tensor& tensor : tensors) {
      if (at::isFloatingType(tensor.scalar_type())) tensor = tensor.to(dtype);
    }
  });
  return result;
}

}  // namespace

ShardUnit::Gathered::Gathered(ShardUnit& unit) : unit_(unit.weak_from_this()), state_(unit.state()) {}

bool ShardUnit::Gathered::is_current() const {
  const auto unit = unit_.lock();
  return unit && unit->has_state(state_);
}

void ShardUnit::Gathered::start() {
  if (is_filled() || is_started()) return;
  const auto unit = unit_.lock();
  const Packing& packing = *unit->packing_;
  const int64_t rank = unit->dims_.mesh.get_local_rank(MeshDim(unit->dims_.shard));
  const auto options = DTensorImpl::of(unit->parameters_[0].tensor)->local().options().dtype(at::kByte);
  TESSERA_CHECK(!options.device().is_meta() || unit->dims_.mesh.world()->is_dry_run(),
                "fully_shard: parameter '", unit->parameters_[0].name,
                "' is on meta and has no values yet. Allocate it (to_empty) and initialise it first.");
  const comm::MemoryInFlight in_flight;
  arriving_ = new_memory({unit->gathered_bytes_}, options);
  if (kept_.defined()) {
    messages_ = new_memory({packing.ranks() * packing.bytes()}, options);
    pending_.emplace(comm::all_gather_into(messages_, kept_, unit->neighbours_->group));
    return;
  }
  comm::Tensors inputs, outputs;
  if (packing.bytes() > 0) message_ = new_memory({packing.bytes()}, options);
  for (const size_t i : c10::irange(unit->layouts_.size())) {
    const Layout& layout = unit->layouts_[i];
    if (!layout.item) continue;
    const DTensorImpl& impl = *DTensorImpl::of(unit->parameters_[i].tensor);
    const at::Tensor shard = laid_out(impl.local(), impl.spec());
    if (layout.is_direct()) {
      inputs.push_back(bytes_of(shard));
      outputs.push_back(view_of(arriving_, layout.offset, {layout.bytes}, {1}, at::kByte));
    } else if (message_.defined()) {
      packing.shard(message_, *layout.packed, rank).copy_(flat(shard));
    }
  }
  const Group group = unit->dims_.mesh.get_group(MeshDim(unit->dims_.shard));
  if (message_.defined() && packing.ranks() > 1) {
    messages_ = new_memory({packing.ranks() * packing.bytes()}, options);
    inputs.push_back(message_);
    outputs.push_back(messages_);
  } else {
    messages_ = message_;
  }
  if (inputs.size() == 1) {
    pending_.emplace(comm::all_gather_into(outputs[0], inputs[0], group));
  } else if (!inputs.empty()) {
    pending_.emplace(comm::all_gather_into(outputs, inputs, group));
  }
}

void ShardUnit::Gathered::fill(bool for_backward) {
  if (is_filled()) return;
  if (pending_) pending_->wait();
  pending_.reset();
  message_.reset();
  const auto unit = unit_.lock();
  take_arrived();
  for (const size_t i : c10::irange(unit->layouts_.size())) {
    const Layout& layout = unit->layouts_[i];
    if (layout.packed) {
      if (messages_.defined()) unit->packing_->unpack(messages_, *layout.packed, locals_[i]);
    } else if (!layout.item) {
      locals_[i].copy_(DTensorImpl::of(unit->parameters_[i].tensor)->local());
    }
  }
  if (for_backward && unit->neighbours_ && !kept_.defined() && messages_.defined()) {
    const int64_t bytes = messages_.numel() / unit->neighbours_->ranks;
    kept_ = messages_.narrow(0, unit->neighbours_->rank * bytes, bytes).clone();
  }
  messages_.reset();
}

void ShardUnit::Gathered::take_arrived() {
  at::Tensor arrived = std::exchange(arriving_, {});
  if (buffer_.defined()) {
    // What was gathered into is not read as the buffer before all of it is there.
    set_memory(*buffer_.storage().unsafeGetStorageImpl(),
               arrived.storage().unsafeGetStorageImpl()->set_data_ptr({nullptr, arrived.device()}));
    return;
  }
  buffer_ = std::move(arrived);
  make_freeable(*buffer_.storage().unsafeGetStorageImpl());
  const auto unit = unit_.lock();
  for (const Layout& layout : unit->layouts_) {
    locals_.push_back(view_of(buffer_, layout.offset, layout.gathered.local_shape(),
                              layout.gathered.local_strides(), layout.gathered.dtype()));
  }
}

void ShardUnit::Gathered::free() {
  if (pending_) pending_->wait();
  pending_.reset();
  message_.reset();
  messages_.reset();
  arriving_.reset();
  if (is_filled()) free_memory(*buffer_.storage().unsafeGetStorageImpl(), weak_from_this());
}

void ShardUnit::Gathered::restore() {
  const auto unit = unit_.lock();
  TESSERA_CHECK(unit && unit->gathered_.get() == this && is_current(),
                "A parameter of a fully sharded unit was changed after a forward whose backward needs it. "
                "Call backward "
                "before optimizer.step() or any other write.");
  unit->unshard();
}

const at::Tensor& ShardUnit::Gathered::tensor(size_t index, bool local) {
  auto& known = tensors_[local ? 1 : 0];
  known.resize(locals_.size());
  at::Tensor& tensor = known[index];
  if (tensor.defined()) return tensor;
  const auto unit = unit_.lock();
  const Layout& layout = unit->layouts_[index];
  if (local && !layout.inner) return tensor = locals_[index];
  tensor = make_dtensor(locals_[index], local ? layout.inner : layout.gathered);
  auto attachment = DTensorImpl::of(unit->parameters_[index].tensor)->attachment();
  if (unit->casts_inputs() && tensor.dim() == 2 &&
      layout.gathered.dtype() == unit->options_.mp_policy.param_dtype)
    attachment = with_cast(attachment, layout.gathered.dtype());
  if (attachment) DTensorImpl::of(tensor)->set_attachment(std::move(attachment));
  return tensor;
}

}  // namespace tessera
