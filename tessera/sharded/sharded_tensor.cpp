#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <ostream>

#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>

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
      .add(ShardedTensorImpl::kKey);
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
  set_sizes_contiguous(state_.metadata.size);
}

const ShardedTensorState& ShardedTensorImpl::state() {
  const bool wanted = requires_grad();
  bool& known = state_.metadata.tensor_properties.requires_grad;
  if (wanted != known) {
    known = wanted;
    for (Shard& shard : state_.local_shards) {
      if (shard.tensor.is_leaf()) shard.tensor.requires_grad_(wanted);
    }
  }
  return state_;
}

const char* ShardedTensorImpl::tensorimpl_type_name() const {
  return "a ShardedTensor, whose data lies on many ranks: use local_shards() for this rank's part, or "
         "gather() "
         "for all";
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> ShardedTensorImpl::copy(Version&& version_counter,
                                                            bool allow_tensor_metadata_change) const {
  ShardedTensorState state = state_;
  for (Shard& shard : state.local_shards) shard.tensor = shard.tensor.detach();
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
  copy_tensor_metadata(other, this, version_counter(), allow_tensor_metadata_change());
  state_ = other->state_;
  for (Shard& shard : state_.local_shards) shard.tensor = shard.tensor.detach();
  state_.metadata.tensor_properties.requires_grad = false;  // until asked for: see state()
}

// --- making

ShardedTensor make_sharded_tensor(ShardedTensorState state) {
  const bool requires_grad = state.metadata.tensor_properties.requires_grad;
  if (state.init_rrefs) state.shared = share_shards(state.local_shards, *state.members);
  at::Tensor tensor = at::detail::make_tensor<ShardedTensorImpl>(std::move(state));
  tensor.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(
      "A ShardedTensor has no data pointer, as its data lies on many ranks: use local_shards() for this "
      "rank's "
      "part, or gather() for all.");
  if (requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

ShardedTensor with_local_tensors(const ShardedTensor& like, std::vector<at::Tensor> tensors,
                                 std::optional<TensorProperties> properties, bool drop_rrefs) {
  ShardedTensorState state = ShardedTensorImpl::of(like)->state();
  state.shared = {};
  if (drop_rrefs) state.init_rrefs = false;
  TESSERA_CHECK(tensors.size() == state.local_shards.size(), "with_local_tensors: there are ",
                state.local_shards.size(), " local shards, but ", tensors.size(), " tensors.");
  if (properties) state.metadata.tensor_properties = *properties;
  std::optional<at::Device> device;
  for (size_t i = 0; i < tensors.size(); ++i) {
    ShardMetadata metadata = state.local_shards[i].metadata;
    if (metadata.placement->device() != tensors[i].device()) {
      device = tensors[i].device();
      metadata.placement = metadata.placement->with_device(*device);
    }
    if (!properties) state.metadata.tensor_properties = TensorProperties::of(tensors[i]);
    state.local_shards[i] = Shard(std::move(tensors[i]), std::move(metadata));
  }
  TESSERA_CHECK(!device, "with_local_tensors: the tensors lie on ", *device,
                ", the tensor to be like does not.");
  return make_sharded_tensor(std::move(state));
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
const std::vector<Shard>& ShardedTensor::local_shards() const { return state_of(*this).local_shards; }
const Members& ShardedTensor::process_group() const { return *state_of(*this).members; }
const MembersPtr& ShardedTensor::process_group_ptr() const { return state_of(*this).members; }
bool ShardedTensor::init_rrefs() const { return state_of(*this).init_rrefs; }

const at::Tensor& ShardedTensor::local_tensor() const {
  const auto& shards = local_shards();
  TESSERA_CHECK(shards.size() == 1, "local_tensor: rank ", process_group().rank(), " holds ", shards.size(),
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

bool ShardedTensor::is_pinned() const { return metadata().tensor_properties.pin_memory; }

ShardedTensor ShardedTensor::pin_memory() const {
  if (is_pinned()) return *this;
  std::vector<at::Tensor> tensors;
  for (const Shard& shard : local_shards()) tensors.push_back(shard.tensor.detach().pin_memory());
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

ShardedTensor ShardedTensor::grad() const {
  std::vector<at::Tensor> tensors;
  for (const Shard& shard : local_shards()) {
    if (!shard.tensor.grad().defined()) return {};
    tensors.push_back(shard.tensor.grad().contiguous());
  }
  TensorProperties properties = metadata().tensor_properties;
  properties.requires_grad = false;
  properties.pin_memory = false;
  return with_local_tensors(*this, std::move(tensors), properties, /*drop_rrefs=*/true);
}

size_t ShardedTensor::hash() const { return std::hash<const void*>()(unsafeGetTensorImpl()); }

std::ostream& operator<<(std::ostream& out, const ShardedTensor& tensor) {
  if (!tensor.defined()) return out << "ShardedTensor undefined";
  return out << "ShardedTensor " << tensor.metadata();
}

}  // namespace tessera::sharded
