#include <tessera/error.h>
#include <tessera/sharded/shard.h>

namespace tessera::sharded {

LocalShard::LocalShard(at::Tensor data, ShardMetadata where)
    : tensor(std::move(data)), metadata(std::move(where)) {
  TESSERA_CHECK_VALUE(tensor.defined(), "The shard ", metadata, " has no tensor.");
  TESSERA_CHECK_VALUE(tensor.sizes() == c10::IntArrayRef(metadata.shard_sizes), "The tensor of the shard ",
                      metadata, " has size ", tensor.sizes(), ".");
  TESSERA_CHECK_VALUE(!metadata.placement || metadata.placement->device() == tensor.device(),
                      "The tensor of the shard ", metadata, " lies on ", tensor.device(),
                      ", not on the device of its placement.");
}

LocalShard LocalShard::from_tensor_and_offsets(at::Tensor tensor, std::vector<int64_t> offsets,
                                               int64_t rank) {
  TESSERA_CHECK_VALUE(tensor.defined(), "A shard at ", c10::IntArrayRef(offsets), " needs a tensor.");
  ShardMetadata metadata(std::move(offsets), tensor.sizes().vec(), RemoteDevice(rank, tensor.device()));
  return {std::move(tensor), std::move(metadata)};
}

}  // namespace tessera::sharded
