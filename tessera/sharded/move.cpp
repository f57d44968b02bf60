#include <tessera/error.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

/// Where "cuda" is on this rank.
at::Device current_device(at::DeviceType type) {
  if (type == at::kCPU || type == at::kMeta) return at::Device(type);
  TESSERA_CHECK(c10::impl::hasDeviceGuardImpl(type), "ShardedTensor: this libtorch has no ",
                c10::DeviceTypeName(type, true), " devices.");
  return c10::impl::getDeviceGuardImpl(type)->getDevice();
}

void check_format(at::MemoryFormat format, const char* call) {
  TESSERA_CHECK(format == at::MemoryFormat::Preserve || format == at::MemoryFormat::Contiguous, call,
                ": only the memory formats contiguous and preserve are supported, not ", format, ".");
}

/// The same shards on other devices of their ranks, in another dtype. Each rank knows its own index of a
/// device only, as in PyTorch it takes the others' to be the same.
ShardedTensor moved(const ShardedTensor& tensor, at::Device device, at::ScalarType dtype, bool keep_index,
                    const ShardedTensor::ToOptions& options) {
  auto placed = [&](ShardMetadata shard) {
    if (!keep_index || shard.placement->device().type() != device.type())
      shard.placement = shard.placement->with_device(device);
    return shard;
  };
  ShardedTensorState state;
  state.metadata = tensor.metadata();
  for (ShardMetadata& shard : state.metadata.shards_metadata) shard = placed(std::move(shard));
  TensorProperties& properties = state.metadata.tensor_properties;
  properties.dtype = dtype;
  properties.pin_memory &= device.is_cpu() && !options.copy;
  properties.requires_grad &=
      at::GradMode::is_enabled() && (at::isFloatingType(dtype) || at::isComplexType(dtype));
  for (const LocalShard& shard : tensor.local_shards()) {
    ShardMetadata metadata = placed(shard.metadata);
    at::Tensor local = shard.tensor.to(at::TensorOptions(dtype).device(metadata.placement->device()),
                                       options.non_blocking, options.copy, options.memory_format);
    state.local_shards.emplace_back(std::move(local), std::move(metadata));
  }
  if (tensor.local_shards().empty())
    state.anchor = tensor.local_tensors()[0].to(at::TensorOptions(dtype).device(device), options.non_blocking,
                                                options.copy);
  for (const LocalShard& shard : state.local_shards) properties.pin_memory = shard.tensor.is_pinned();

  // Chunks stay chunks; whatever else it was, all shards are known by name.
  const auto* chunks = dynamic_cast<const ChunkShardingSpec*>(&tensor.sharding_spec());
  if (chunks) {
    std::vector<RemoteDevice> placements;
    for (const RemoteDevice& placement : chunks->placements())
      placements.push_back(*placed({{}, {}, placement}).placement);
    state.spec = std::make_shared<ChunkShardingSpec>(chunks->dim(), std::move(placements));
  } else {
    state.spec = infer_sharding_spec(state.metadata.shards_metadata);
  }
  const bool same_kind = device.type() == tensor.device().type();
  state.members = tensor.process_group_ptr();
  if (options.process_group || !same_kind) {
    state.members = std::make_shared<const Members>(
        options.process_group ? *options.process_group : Ranks(tensor.process_group().ranks()),
        device.type());
  }
  state.init_rrefs = tensor.init_rrefs();
  return make_sharded_tensor(std::move(state));
}

}  // namespace

ShardedTensor ShardedTensor::to(const ToOptions& options) const {
  log_call("ShardedTensor::to", [&] { return metadata().str(); });
  check_format(options.memory_format, "ShardedTensor::to");
  const at::ScalarType dtype = options.dtype.value_or(scalar_type());
  const at::Device device = options.device ? current_device(options.device->type()) : this->device();
  if (options.device && options.device->has_index() && options.device->index() != device.index() &&
      device.has_index()) {
    TORCH_WARN("ShardedTensor::to moves each rank's shards to its current device ", device, ", not to ",
               *options.device, "; use reshard to move them.");
  }
  if (!options.copy && dtype == scalar_type() && device == this->device() && !options.process_group)
    return *this;
  return moved(*this, device, dtype, /*keep_index=*/false, options);
}

ShardedTensor ShardedTensor::to(at::ScalarType dtype) const { return to(ToOptions{.dtype = dtype}); }
ShardedTensor ShardedTensor::to(at::Device device) const { return to(ToOptions{.device = device}); }
ShardedTensor ShardedTensor::to(at::Device device, at::ScalarType dtype) const {
  return to(ToOptions{.device = device, .dtype = dtype});
}
ShardedTensor ShardedTensor::to(const at::Tensor& other) const {
  return to(ToOptions{.device = other.device(), .dtype = other.scalar_type()});
}

ShardedTensor ShardedTensor::cpu(at::MemoryFormat memory_format,
                                 const std::optional<Ranks>& process_group) const {
  log_call("ShardedTensor::cpu", [&] { return metadata().str(); });
  check_format(memory_format, "ShardedTensor::cpu");
  const auto& shards = metadata().shards_metadata;
  if (std::all_of(shards.begin(), shards.end(),
                  [](const ShardMetadata& shard) { return shard.placement->device().is_cpu(); }))
    return *this;
  return moved(*this, at::kCPU, scalar_type(), /*keep_index=*/true,
               ToOptions{.memory_format = memory_format, .process_group = process_group});
}

ShardedTensor ShardedTensor::cuda(std::optional<at::Device> device, bool non_blocking,
                                  at::MemoryFormat memory_format,
                                  const std::optional<Ranks>& process_group) const {
  log_call("ShardedTensor::cuda", [&] { return metadata().str(); });
  check_format(memory_format, "ShardedTensor::cuda");
  const at::Device current = current_device(at::kCUDA);
  TESSERA_CHECK_VALUE(!device || *device == current || (device->is_cuda() && !device->has_index()),
                      "ShardedTensor::cuda: each rank's shards go to its current device ", current,
                      ", not to ", *device, "; leave the device out, or make it the current one.");
  return moved(
      *this, current, scalar_type(), /*keep_index=*/false,
      ToOptions{
          .non_blocking = non_blocking, .memory_format = memory_format, .process_group = process_group});
}

}  // namespace tessera::sharded
