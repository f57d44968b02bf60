#include <tessera/comm/agreement.h>
#include <tessera/error.h>
#include <tessera/sharded/exchange.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/shard_tensor.h>
#include <tessera/sharded/sharded_tensor_impl.h>
#include <tessera/sharded/validate.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

/// The tensor sharded by `spec`, of which this rank has these local tensors in order, or what stands for none.
ShardedTensor assembled(ShardedTensorMetadata metadata, const ShardingSpec& spec,
                        std::vector<at::Tensor> tensors, const MembersPtr& members, bool init_rrefs) {
  ShardedTensorState state;
  const std::vector<ShardMetadata> mine = local_part(metadata.shards_metadata, *members);
  for (const size_t i : c10::irange(mine.size()))
    state.local_shards.emplace_back(std::move(tensors[i]), mine[i]);
  if (mine.empty()) state.anchor = std::move(tensors[0]);
  state.metadata = std::move(metadata);
  state.spec = spec.clone();
  state.members = members;
  state.init_rrefs = init_rrefs;
  return make_sharded_tensor(std::move(state));
}

/// What `spec` makes of such a tensor, checked: any class may have written it.
ShardedTensorMetadata checked_metadata(const ShardingSpec& spec, at::IntArrayRef size,
                                       const TensorProperties& properties, const Members& members) {
  ShardedTensorMetadata metadata = spec.build_metadata(size, properties);
  validate_non_overlapping_shards_metadata(metadata.shards_metadata);
  check_tensor(metadata.shards_metadata, size);
  local_part(metadata.shards_metadata, members);
  return metadata;
}

/// What all ranks that shard a tensor must say alike.
std::string said(const at::Tensor& tensor, const ShardingSpec& spec, int64_t src_rank) {
  return c10::str("src_rank ", src_rank, ", ", tensor.scalar_type(), tensor.sizes(),
                  tensor.requires_grad() ? " requires_grad, " : ", ", spec);
}

}  // namespace

ShardedTensor ShardedTensor::reshard(const ShardingSpec& spec) const {
  log_call("ShardedTensor::reshard", [&] { return c10::str(metadata(), " to ", spec); });
  process_group().check_member("reshard");
  TensorProperties properties = metadata().tensor_properties;
  properties.pin_memory = false;
  properties.requires_grad &= at::GradMode::is_enabled();
  const bool is_same = spec == sharding_spec();
  ShardedTensorMetadata target;
  const comm::Agreement agreement("reshard", process_group().group(), [&] {
    if (!is_same) target = checked_metadata(spec, sizes(), properties, process_group());
    return c10::str(scalar_type(), sizes(), " from ", sharding_spec(), " to ", spec);
  });
  if (is_same) {
    agreement.settle();
    return *this;
  }
  auto tensors = exchange(metadata().shards_metadata, local_tensors(), target.shards_metadata,
                          properties.dtype, process_group_ptr());
  return assembled(std::move(target), spec, std::move(tensors), process_group_ptr(), init_rrefs());
}

const ShardedTensor& ShardedTensor::reshard_(const ShardingSpec& spec) const {
  const ShardedTensor gradient = is_leaf() ? grad() : ShardedTensor();
  const at::AutoGradMode grad_mode(at::GradMode::is_enabled() && !is_leaf());
  const ShardedTensor resharded = reshard(spec);
  if (resharded.is_same(*this)) return *this;
  const ShardedTensor its_gradient = gradient.defined() ? gradient.reshard(spec) : ShardedTensor();
  ShardedTensorImpl::of(*this)->become(ShardedTensorImpl::of(resharded)->state());
  if (its_gradient.defined()) mutable_grad() = its_gradient;
  return *this;
}

ShardedTensor ShardingSpec::shard(const at::Tensor& tensor, int64_t src_rank,
                                  const Ranks& process_group) const {
  const auto members = std::make_shared<const Members>(process_group, tensor.device().type());
  TensorProperties properties;
  ShardedTensorMetadata metadata;
  const comm::Agreement agreement("ShardingSpec::shard", members->group(), [&] {
    TESSERA_CHECK_INDEX(src_rank >= 0 && src_rank < members->size(), "ShardingSpec::shard: there is no rank ",
                        src_rank, " in a group of ", members->size(), " ranks.");
    properties = TensorProperties::of(tensor);
    metadata = checked_metadata(*this, tensor.sizes(), properties, *members);
    return said(tensor, *this, src_rank);
  });
  const std::vector<ShardMetadata> unsharded = {{std::vector<int64_t>(tensor.dim(), 0), tensor.sizes().vec(),
                                                 RemoteDevice(members->ranks()[src_rank], tensor.device())}};
  std::vector<at::Tensor> tensors(1);  // outside of the group, nothing
  if (members->is_member()) {
    const at::NoGradGuard no_grad;
    tensors = exchange(unsharded, {tensor.detach()}, metadata.shards_metadata, properties.dtype, members);
    for (at::Tensor& each : tensors) {
      if (properties.pin_memory) each = each.pin_memory();
      each.requires_grad_(properties.requires_grad);
    }
  }
  return assembled(std::move(metadata), *this, std::move(tensors), members, false);
}

ShardedTensor shard_tensor(const at::Tensor& tensor, const ShardingSpec& spec, int64_t src_rank,
                           const Ranks& process_group) {
  log_call("sharded::shard_tensor", [&] { return c10::str(tensor.sizes(), " ", spec); });
  const Members members(process_group, tensor.device().type());
  const comm::Agreement agreement("shard_tensor", members.group(), [&] {
    TESSERA_CHECK_VALUE(tensor.is_contiguous(),
                        "shard_tensor: the tensor is not contiguous; call contiguous() on it.");
    return said(tensor, spec, src_rank);
  });
  ShardedTensor result = spec.shard(tensor, src_rank, process_group);
  agreement.settle();  // a spec of the user's may move nothing
  return result;
}

}  // namespace tessera::sharded
