#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <ostream>
#include <unordered_map>

#include <ATen/ops/_has_compatible_shallow_copy_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

/// The local shards', or, without any, that of the first placement's kind.
at::Device device_of(const ShardedTensorState& state) {
  if (!state.local_shards.empty()) return state.local_shards[0].tensor.device();
  for (const ShardMetadata& shard : state.metadata.shards_metadata) {
    if (shard.placement) return at::Device(shard.placement->device().type());
  }
  return at::kCPU;
}

c10::DispatchKeySet keys_of(const ShardedTensorState& state) {
  const auto& properties = state.metadata.tensor_properties;
  return c10::DispatchKeySet(c10::computeDispatchKey(properties.dtype, std::nullopt, device_of(state)))
      .add(kShardedTensorKey);
}

const ShardedTensorState& state_of(const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined(), "This ShardedTensor is undefined.");
  return ShardedTensorImpl::of(tensor)->state();
}

}  // namespace

// --- the impl

ShardedTensorImpl::ShardedTensorImpl(ShardedTensorState state)
    : TensorImpl(keys_of(state), c10::scalarTypeToTypeMeta(state.metadata.tensor_properties.dtype),
                 device_of(state)),
      state_(std::move(state)) {
  set_storage_access_should_throw();
  static_cast<void>(state_.metadata.numel());  // throws if there are too many
  set_sizes_contiguous(state_.metadata.size);
  if (state_.local_shards.empty() && !state_.anchor.defined()) {
    const TensorProperties& properties = state_.metadata.tensor_properties;
    state_.anchor = empty_part(state_.metadata.size, properties.dtype, device());
    state_.anchor.set_requires_grad(properties.requires_grad);
  }
}

const ShardedTensorState& ShardedTensorImpl::state() {
  agree();
  return state_;
}

const char* ShardedTensorImpl::tensorimpl_type_name() const {
  return "a ShardedTensor, whose data lies on many ranks: use local_shards() for those of this rank, or "
         "gather() "
         "for all";
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> ShardedTensorImpl::copy(Version&& version_counter,
                                                            bool allow_tensor_metadata_change) const {
  ShardedTensorState state = state_;
  for (LocalShard& shard : state.local_shards) shard.tensor = shard.tensor.detach();
  if (state.anchor.defined()) state.anchor = state.anchor.detach();
  state.metadata.tensor_properties.requires_grad = false;
  auto impl = c10::make_intrusive<ShardedTensorImpl>(std::move(state));
  copy_tensor_metadata(this, impl.get(), std::forward<Version>(version_counter),
                       allow_tensor_metadata_change);
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> ShardedTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_tensor_metadata_change) const {
  return copy(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> ShardedTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const {
  return copy(std::move(version_counter), allow_tensor_metadata_change);
}

void ShardedTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) {
  auto* other = dynamic_cast<ShardedTensorImpl*>(impl.get());
  TESSERA_CHECK(other, "The data of a ShardedTensor can only be set to that of another ShardedTensor.");
  agree();  // or a gradient that was written would be lost
  copy_tensor_metadata(other, this, version_counter(), allow_tensor_metadata_change());
  ShardedTensorState now = other->state_;
  // Where it can, each local tensor stays the tensor that it was, as the sharded one does: gradients, hooks and
  // optimisers go on with it.
  const std::vector<at::Tensor> locals = state_.local_tensors();
  const std::vector<at::Tensor> others = now.local_tensors();
  bool stays = locals.size() == others.size();
  for (size_t i = 0; stays && i < locals.size(); ++i) {
    stays = locals[i].is_leaf() && locals[i].sizes() == others[i].sizes() &&
            at::_has_compatible_shallow_copy_type(locals[i], others[i]);
  }
  auto taken = [&](at::Tensor& theirs, size_t i) {
    if (stays) locals[i].set_data(theirs.detach());
    theirs = stays ? locals[i] : theirs.detach();
  };
  for (const size_t i : c10::irange(now.local_shards.size())) taken(now.local_shards[i].tensor, i);
  if (now.local_shards.empty()) taken(now.anchor, 0);
  now.metadata.tensor_properties.requires_grad = locals[0].requires_grad() && stays;
  watches_ &= stays;
  state_ = std::move(now);
}

// --- making

ShardedTensor make_sharded_tensor(ShardedTensorState state) {
  const bool requires_grad = state.metadata.tensor_properties.requires_grad;
  if (state.init_rrefs) state.shared = share_shards(state.local_shards, *state.members);
  at::Tensor tensor = at::detail::make_tensor<ShardedTensorImpl>(std::move(state));
  tensor.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(
      "A ShardedTensor has no data pointer, as its data lies on many ranks: use local_shards() for those of "
      "this rank, or gather() for all.");
  if (requires_grad) tensor.set_requires_grad(true);
  state_of(tensor);  // the history of the local tensors is that of the sharded tensor
  return tensor;
}

ShardedTensor with_local_tensors(const ShardedTensor& like, std::vector<at::Tensor> tensors,
                                 std::optional<TensorProperties> properties, bool drop_rrefs) {
  ShardedTensorState state = ShardedTensorImpl::of(like)->state();
  state.shared = {};
  if (drop_rrefs) state.init_rrefs = false;
  TESSERA_CHECK(tensors.size() == state.local_tensors().size(), "with_local_tensors: there are ",
                state.local_tensors().size(), " local tensors, but ", tensors.size(), " were given.");
  state.metadata.tensor_properties = properties ? *properties : TensorProperties::of(tensors[0]);
  if (state.local_shards.empty()) state.anchor = tensors[0];
  for (size_t i = 0; i < state.local_shards.size(); ++i)
    state.local_shards[i] = LocalShard(std::move(tensors[i]), std::move(state.local_shards[i].metadata));
  return make_sharded_tensor(std::move(state));
}

at::Tensor empty_part(c10::IntArrayRef size, at::ScalarType dtype, at::Device device) {
  std::vector<int64_t> sizes = size.empty() ? std::vector<int64_t>{0} : size.vec();
  sizes[0] = 0;
  return at::empty(sizes, at::TensorOptions(dtype).device(device));
}

std::vector<at::Tensor> ShardedTensorState::local_tensors() const {
  if (local_shards.empty()) return {anchor};
  std::vector<at::Tensor> result;
  for (const LocalShard& shard : local_shards) result.push_back(shard.tensor);
  return result;
}

bool is_same_tiling(const std::vector<ShardMetadata>& a, const std::vector<ShardMetadata>& b) {
  if (a == b) return true;
  std::unordered_map<ShardMetadata, int64_t> counts;
  for (const ShardMetadata& shard : a) ++counts[shard];
  for (const ShardMetadata& shard : b) {
    if (--counts[shard] < 0) return false;
  }
  return a.size() == b.size();
}

std::vector<at::Tensor> local_tensors_as(const std::vector<ShardMetadata>& tiling, const at::Tensor& tensor,
                                         const std::string& what) {
  TESSERA_CHECK(ShardedTensor::is_sharded_tensor(tensor), what,
                ": expected a sharded tensor, but this one, of size ", tensor.sizes(),
                ", is a plain one; shard it with shard_tensor.");
  const ShardedTensorState& state = state_of(tensor);
  const std::vector<ShardMetadata>& own = state.metadata.shards_metadata;
  TESSERA_CHECK(is_same_tiling(own, tiling), what, ": its sharded tensors are sharded differently, one by ",
                *state.spec, "; reshard it.");
  if (own == tiling || state.local_shards.empty()) return state.local_tensors();
  std::unordered_multimap<ShardMetadata, at::Tensor> locals;
  for (const LocalShard& shard : state.local_shards) locals.emplace(shard.metadata, shard.tensor);
  std::vector<at::Tensor> result;
  for (const ShardMetadata& shard : tiling) {
    const auto found = locals.find(shard);
    if (found == locals.end()) continue;
    result.push_back(found->second);
    locals.erase(found);
  }
  return result;
}

std::vector<ShardMetadata> local_part(const std::vector<ShardMetadata>& shards, const Members& members) {
  std::vector<ShardMetadata> result;
  for (const ShardMetadata& shard : shards) {
    if (rank_of(shard.placement, members) == members.rank()) result.push_back(shard);
  }
  return result;
}

// --- the handle

ShardedTensor::ShardedTensor(at::Tensor tensor) : at::Tensor(std::move(tensor)) {
  TESSERA_CHECK(!defined() || is_sharded_tensor(*this),
                "This tensor is not sharded. sharded::shard_tensor, sharded::init_from_local_shards and "
                "sharded::empty make tensors that are.");
}

bool ShardedTensor::is_sharded_tensor(const at::Tensor& tensor) {
  return tensor.defined() && ShardedTensorImpl::of(tensor);
}

const ShardedTensorMetadata& ShardedTensor::metadata() const { return state_of(*this).metadata; }
const ShardingSpec& ShardedTensor::sharding_spec() const { return *state_of(*this).spec; }
const ShardingSpecPtr& ShardedTensor::sharding_spec_ptr() const { return state_of(*this).spec; }
const std::vector<LocalShard>& ShardedTensor::local_shards() const { return state_of(*this).local_shards; }
const Members& ShardedTensor::process_group() const { return *state_of(*this).members; }
const MembersPtr& ShardedTensor::process_group_ptr() const { return state_of(*this).members; }
bool ShardedTensor::init_rrefs() const { return state_of(*this).init_rrefs; }

std::vector<at::Tensor> ShardedTensor::local_tensors() const { return state_of(*this).local_tensors(); }

const at::Tensor& ShardedTensor::local_tensor() const {
  const auto& shards = local_shards();
  TESSERA_CHECK(shards.size() == 1, "local_tensor: rank ", process_group().rank(), " has ", shards.size(),
                " shards of this tensor, not one. Use local_shards().");
  return shards[0].tensor;
}

const RemoteShards& ShardedTensor::remote_shards() const {
  const ShardedTensorState& state = state_of(*this);
  TESSERA_CHECK(
      state.init_rrefs,
      "remote_shards: this tensor was made without init_rrefs, so it does not know the other ranks' "
      "shards.");
  return state.shared.others;
}

void ShardedTensor::set_local_tensor(int64_t index, at::Tensor tensor) const {
  ShardedTensorState state = state_of(*this);
  const auto count = static_cast<int64_t>(state.local_shards.size());
  TESSERA_CHECK_INDEX(index >= 0 && index < count, "set_local_tensor: rank ", process_group().rank(), " has ",
                      count, " shards of this tensor, and none of index ", index, ".");
  TESSERA_CHECK(!state.init_rrefs,
                "set_local_tensor: other ranks can read the shards of a tensor that was made with "
                "init_rrefs; copy_ into the local tensor instead.");
  TESSERA_CHECK_VALUE(tensor.defined() && tensor.scalar_type() == scalar_type() && tensor.is_contiguous(),
                      "set_local_tensor: expected a contiguous tensor of ", scalar_type(), ", got ",
                      tensor.defined() ? c10::str(tensor.scalar_type(), tensor.sizes()) : "none", ".");
  state.local_shards[index] = LocalShard(std::move(tensor), std::move(state.local_shards[index].metadata));
  ShardedTensorImpl::of(*this)->become(std::move(state));
}

bool ShardedTensor::is_pinned() const { return metadata().tensor_properties.pin_memory; }

ShardedTensor ShardedTensor::pin_memory() const {
  if (is_pinned()) return *this;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& local : local_tensors())
    tensors.push_back(local_shards().empty() ? local.detach() : local.detach().pin_memory());
  TensorProperties properties = metadata().tensor_properties;
  properties.pin_memory = true;
  properties.requires_grad = false;
  return with_local_tensors(*this, std::move(tensors), properties);
}

const ShardedTensor& ShardedTensor::requires_grad_(bool requires_grad) const {
  set_requires_grad(requires_grad);
  state_of(*this);
  return *this;
}

ShardedTensor ShardedTensor::grad() const { return at::Tensor::grad(); }

size_t ShardedTensor::hash() const { return std::hash<const void*>()(unsafeGetTensorImpl()); }

std::ostream& operator<<(std::ostream& out, const ShardedTensor& tensor) {
  if (!tensor.defined()) return out << "ShardedTensor undefined";
  return out << "ShardedTensor " << tensor.metadata();
}

}  // namespace tessera::sharded
