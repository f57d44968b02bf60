#include <tessera/comm/agreement.h>
#include <tessera/comm/collectives.h>
#include <tessera/error.h>
#include <tessera/redistribute/memory.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

/// What the tensor is gathered into: what was given, or a new tensor. Undefined but on the destination.
at::Tensor output_of(const ShardedTensor& tensor, int64_t dst, const ShardedTensor::GatherOptions& options,
                     at::ScalarType dtype) {
  const Members& members = tensor.process_group();
  const at::Tensor& out = options.out;
  if (members.group_rank() != dst) {
    TESSERA_CHECK_VALUE(!out.defined(), "gather: an output was given on rank ", members.rank(),
                        ", but the tensor is gathered on rank ", members.ranks()[dst],
                        "; give it there alone.");
    return {};
  }
  if (!out.defined()) return new_memory(tensor.sizes(), at::TensorOptions(dtype).device(tensor.device()));
  TESSERA_CHECK_VALUE(out.sizes() == tensor.sizes(), "gather: the output has size ", out.sizes(),
                      ", the tensor ", tensor.sizes(), ".");
  TESSERA_CHECK_VALUE(!options.enforce_dtype || out.scalar_type() == tensor.scalar_type(),
                      "gather: the output is ", out.scalar_type(), ", but the tensor ", tensor.scalar_type(),
                      ", and enforce_dtype was asked for.");
  return out;
}

}  // namespace

at::Tensor ShardedTensor::gather(int64_t dst) const { return gather(dst, {}); }

at::Tensor ShardedTensor::gather(int64_t dst, const GatherOptions& options) const {
  const Members& members = process_group();
  log_call("ShardedTensor::gather", [&] { return c10::str(metadata(), " to ", dst); });
  members.check_member("gather");
  const bool is_destination = members.group_rank() == dst;
  const at::ScalarType dtype = options.dtype.value_or(scalar_type());
  at::Tensor out;
  const comm::Agreement agreement("gather", members.group(), [&] {
    TESSERA_CHECK_INDEX(dst >= 0 && dst < members.size(), "gather: there is no rank ", dst, " in a group of ",
                        members.size(), " ranks.");
    out = output_of(*this, dst, options, dtype);
    return c10::str(scalar_type(), sizes(), " of ", sharding_spec(), ", to rank ", dst, " as ", dtype);
  });

  const at::NoGradGuard no_grad;
  const at::TensorOptions in_transit = at::TensorOptions(dtype).device(members.device());
  auto part_of_out = [&](const ShardMetadata& shard) {
    at::Tensor part = out;
    for (const int64_t dim : c10::irange(shard.dim()))
      part = part.narrow(dim, shard.shard_offsets[dim], shard.shard_sizes[dim]);
    return part;
  };

  // Each rank's shards one after the other, as the metadata lists them.
  std::vector<std::vector<const ShardMetadata*>> by_rank(members.size());
  for (const ShardMetadata& shard : metadata().shards_metadata) {
    if (shard.numel() > 0)
      by_rank[*members.group_rank_of(rank_of(shard.placement, members))].push_back(&shard);
  }
  comm::Tensors flat;
  for (const LocalShard& shard : local_shards()) {
    if (shard.tensor.numel() == 0) continue;
    if (is_destination) {
      part_of_out(shard.metadata).copy_(shard.tensor.to(dtype));
    } else {
      flat.push_back(shard.tensor.detach().reshape({-1}).to(in_transit));
    }
  }
  at::Tensor input;
  if (flat.size() == 1) input = flat[0];
  if (flat.size() > 1) input = at::cat(flat);
  if (flat.empty()) input = at::empty({0}, in_transit);

  comm::Tensors outputs;
  if (is_destination) {
    for (const int64_t rank : c10::irange(members.size())) {
      int64_t size = 0;
      if (rank != dst) {
        for (const ShardMetadata* shard : by_rank[rank]) size += shard->numel();
      }
      outputs.push_back(new_memory({size}, in_transit));
    }
  }
  comm::gather(outputs, input, dst, members.group()).wait();
  if (!is_destination) return {};
  for (const int64_t rank : c10::irange(members.size())) {
    if (rank == dst) continue;
    int64_t begin = 0;
    for (const ShardMetadata* shard : by_rank[rank]) {
      part_of_out(*shard).copy_(outputs[rank].narrow(0, begin, shard->numel()).view(shard->shard_sizes));
      begin += shard->numel();
    }
  }
  return out;
}

}  // namespace tessera::sharded
