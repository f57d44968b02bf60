#include <tessera/comm/agreement.h>
#include <tessera/error.h>
#include <tessera/sharded/bridge.h>
#include <tessera/sharded/init.h>
#include <tessera/sharded/log.h>
#include <tessera/sharded/sharded_tensor_impl.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>

namespace tessera::sharded {

namespace {

/// The boxes that the rank at a coordinate holds, in the order in which they lie in its local tensor: one for
/// each choice of a piece per dim. Empty if it holds nothing.
std::vector<ShardMetadata> boxes_at(const Spec& spec, c10::IntArrayRef coordinate, at::Device device) {
  const RemoteDevice placement(spec.mesh().rank_at(coordinate), device);
  std::vector<ShardMetadata> boxes{{{}, {}, placement}};
  for (const Pieces& pieces : spec.local_pieces(coordinate)) {
    std::vector<ShardMetadata> next;
    for (const ShardMetadata& box : boxes) {
      for (const Range& piece : pieces) {
        ShardMetadata longer = box;
        longer.shard_offsets.push_back(piece.offset);
        longer.shard_sizes.push_back(piece.size);
        next.push_back(std::move(longer));
      }
    }
    boxes = std::move(next);
  }
  return boxes;
}

/// The shards that `spec` asks for, and whether they are those of the tensor.
struct Wanted {
  std::vector<ShardMetadata> shards;
  bool fits = true;
};

/// Throws unless `spec` gives each rank of the tensor's group one box at most.
Wanted wanted_shards(const ShardedTensor& tensor, const Spec& spec) {
  const DeviceMesh& mesh = spec.mesh();
  TESSERA_CHECK_VALUE(!spec.has_partial(), "to_dtensor: a sharded tensor cannot become a partial one, as ",
                      spec, "; give placements that shard it, and redistribute it.");
  for (const int64_t dim : c10::irange(mesh.ndim())) {
    TESSERA_CHECK_VALUE(!spec.placement(dim).is_replicate() || mesh.size(dim) == 1,
                        "to_dtensor: a sharded tensor cannot become a replicated one at once, as ", spec,
                        "; shard it on all mesh dims, and redistribute it.");
  }
  std::vector<int64_t> its = tensor.process_group().ranks(), meshes = mesh.ranks();
  std::sort(its.begin(), its.end());
  std::sort(meshes.begin(), meshes.end());
  TESSERA_CHECK_VALUE(its == meshes, "to_dtensor: the tensor is shared by ranks ", c10::IntArrayRef(its),
                      ", but the mesh has ranks ", c10::IntArrayRef(meshes), ".");

  std::map<int64_t, std::vector<const ShardMetadata*>> by_rank;
  for (const ShardMetadata& shard : tensor.metadata().shards_metadata) {
    if (shard.numel() > 0) by_rank[rank_of(shard.placement, tensor.process_group())].push_back(&shard);
  }
  Wanted wanted;
  for (const c10::DimVector& coordinate : mesh.coordinates()) {
    const int64_t rank = mesh.rank_at(coordinate);
    auto boxes = boxes_at(spec, coordinate, at::Device(mesh.device_type()));
    TESSERA_CHECK_VALUE(boxes.size() <= 1, "to_dtensor: under ", spec, " rank ", rank, " has ", boxes.size(),
                        " boxes of the tensor; give placements that shard it, and redistribute it.");
    const auto& mine = by_rank[rank];
    wanted.fits &= mine.size() == boxes.size();
    if (wanted.fits && !boxes.empty()) {
      wanted.fits =
          mine[0]->shard_offsets == boxes[0].shard_offsets && mine[0]->shard_sizes == boxes[0].shard_sizes;
    }
    std::move(boxes.begin(), boxes.end(), std::back_inserter(wanted.shards));
  }
  return wanted;
}

/// This is not the first of the ranks that hold the same.
bool is_replica(const Spec& spec, c10::IntArrayRef coordinate) {
  for (const int64_t dim : c10::irange(spec.mesh().ndim())) {
    if (spec.placement(dim).is_replicate() && coordinate[dim] != 0) return true;
  }
  return false;
}

}  // namespace

DTensor to_dtensor(const ShardedTensor& tensor, const DeviceMesh& mesh, Placements placements) {
  log_call("sharded::to_dtensor", [&] { return tensor.metadata().str(); });
  std::optional<Spec> spec;
  Wanted wanted;
  const comm::Agreement agreement("to_dtensor", tensor.process_group().group(), [&] {
    spec.emplace(mesh, placements, tensor.sizes(), std::nullopt, tensor.scalar_type());
    wanted = wanted_shards(tensor, *spec);
    return c10::str("from ", tensor.sharding_spec(), " to ", *spec, " on ranks ",
                    c10::IntArrayRef(mesh.ranks()));
  });
  ShardedTensor resharded = tensor;
  if (wanted.fits) {
    agreement.settle();
  } else {
    resharded = tensor.reshard(EnumerableShardingSpec(std::move(wanted.shards)));
  }
  at::Tensor local;
  for (const at::Tensor& each :
       resharded.local_tensors()) {  // one at least: so all ranks take part in backward
    if (each.numel() > 0 || !local.defined()) local = each;
  }
  local = local.reshape(spec->local_shape());
  DTensor::FromLocalOptions options;
  options.shape = tensor.sizes().vec();
  return DTensor::from_local(local, mesh, std::move(placements), options);
}

DTensor to_dtensor(const ShardedTensor& tensor) {
  const Members& members = tensor.process_group();
  std::vector<int64_t> ranks = members.ranks();
  int64_t dim = 0;
  if (const auto* chunks = dynamic_cast<const ChunkShardingSpec*>(&tensor.sharding_spec())) {
    std::vector<int64_t> order;
    for (const RemoteDevice& placement : chunks->placements()) order.push_back(rank_of(placement, members));
    std::vector<int64_t> a = order, b = ranks;
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    if (a == b) {
      ranks = order;
      dim = chunks->dim();
    }
  }
  const std::vector<int64_t> shape{static_cast<int64_t>(ranks.size())};
  const DeviceMesh mesh(tensor.device().type(), shape, std::move(ranks), {}, members.world());
  return to_dtensor(tensor, mesh, {tessera::Shard(static_cast<int32_t>(dim))});
}

ShardedTensor from_dtensor(const DTensor& tensor) {
  const Spec& spec = tensor.spec();
  log_call("sharded::from_dtensor", [&] { return spec.str(); });
  TESSERA_CHECK_VALUE(!spec.has_partial(), "from_dtensor: ", spec,
                      " has yet to be reduced; redistribute it to placements that are not partial.");
  const DeviceMesh& mesh = spec.mesh();
  const at::Device device = tensor.device();
  ShardedTensorState state;
  state.metadata.size = tensor.sizes().vec();
  state.metadata.tensor_properties.dtype = tensor.scalar_type();
  state.metadata.tensor_properties.requires_grad = tensor.requires_grad() && at::GradMode::is_enabled();
  state.members = std::make_shared<const Members>(Ranks(mesh.ranks()), mesh.device_type());
  auto& shards = state.metadata.shards_metadata;
  std::vector<ShardMetadata> mine;
  if (mesh.ndim() == 1 && spec.placement(0).is_shard()) {
    std::vector<RemoteDevice> placements;
    for (const int64_t rank : mesh.ranks()) placements.emplace_back(rank, device);
    state.spec = std::make_shared<ChunkShardingSpec>(spec.placement(0).dim(), std::move(placements));
    shards = state.spec->build_metadata(tensor.sizes(), {}).shards_metadata;
    mine = local_part(shards, *state.members);
  } else {
    for (const c10::DimVector& coordinate : mesh.coordinates()) {
      if (is_replica(spec, coordinate)) continue;
      auto boxes = boxes_at(spec, coordinate, device);
      if (mesh.rank_at(coordinate) == mesh.get_rank()) mine = boxes;
      std::move(boxes.begin(), boxes.end(), std::back_inserter(shards));
    }
    if (shards.empty()) {  // a tensor without elements: its first rank holds it
      const RemoteDevice first(mesh.ranks()[0], device);
      shards.emplace_back(std::vector<int64_t>(tensor.dim(), 0), tensor.sizes().vec(), first);
      if (mesh.get_rank() == mesh.ranks()[0]) mine = shards;
    }
    state.spec = infer_sharding_spec(shards);
  }
  // Of replicas the first alone has a gradient: it is that of all of them together.
  Placements gradients = spec.placements();
  for (Placement& each : gradients) {
    if (each.is_replicate()) each = Partial();
  }
  at::Tensor local = gradients == spec.placements() ? tensor.to_local() : tensor.to_local(gradients);
  if (!state.metadata.tensor_properties.requires_grad) local = local.detach();
  if (mine.empty()) {
    const at::Tensor empty = empty_part(tensor.sizes(), tensor.scalar_type(), device);
    state.anchor = local.reshape({-1}).narrow(0, 0, 0).reshape(empty.sizes());
  } else {
    if (tensor.numel() == 0) local = local.reshape(mine[0].shard_sizes);
    // In the local tensor the pieces of each dim lie one after the other.
    std::vector<std::map<int64_t, int64_t>> local_offset(tensor.dim());
    for (const int64_t dim : c10::irange(tensor.dim())) {
      for (const ShardMetadata& box : mine) local_offset[dim][box.shard_offsets[dim]] = box.shard_sizes[dim];
      int64_t next = 0;
      for (auto& [offset, size] : local_offset[dim]) next += std::exchange(size, next);
    }
    for (ShardMetadata& box : mine) {
      at::Tensor part = local;
      for (const int64_t dim : c10::irange(tensor.dim()))
        part = part.narrow(dim, local_offset[dim][box.shard_offsets[dim]], box.shard_sizes[dim]);
      part = mine.size() == 1 ? local.contiguous() : part.contiguous();
      state.local_shards.emplace_back(std::move(part), std::move(box));
    }
  }
  return make_sharded_tensor(std::move(state));
}

}  // namespace tessera::sharded
