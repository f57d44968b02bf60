#include <tessera/dtensor/dtensor.h>
#include <tessera/nn/saved_shard.h>

#include <utility>

#include <ATen/core/grad_mode.h>

namespace tessera {

namespace {

DTensor with_placement(const DTensor& tensor, int64_t mesh_dim, const Placement& placement) {
  Placements placements = tensor.placements();
  placements[mesh_dim] = placement;
  return tensor.redistribute(std::move(placements));
}

}  // namespace

SavedShard::SavedShard(at::Tensor shard, int64_t mesh_dim, bool was_plain)
    : shard_(std::move(shard)), mesh_dim_(mesh_dim), was_plain_(was_plain) {}

std::optional<SavedShard> SavedShard::of(const at::Tensor& tensor, const Layout& layout, bool is_replica) {
  const at::NoGradGuard no_grad;
  const bool is_plain = !DTensor::is_dtensor(tensor);
  if ((is_plain && !is_replica) || tensor.dim() < 2 || layout.dim >= tensor.dim() ||
      layout.dim < -tensor.dim())
    return std::nullopt;
  const DTensor replica = is_plain
                              ? DTensor::from_local(tensor.detach(), layout.mesh, replicated(layout.mesh))
                              : DTensor(tensor.detach());
  if (replica.device_mesh() != layout.mesh || !replica.placements()[layout.mesh_dim].is_replicate())
    return std::nullopt;
  // A copy: a view would keep the unsharded tensor alive.
  return SavedShard(with_placement(replica, layout.mesh_dim, Shard(layout.dim)).clone(), layout.mesh_dim,
                    is_plain);
}

at::Tensor SavedShard::gathered() const {
  const at::NoGradGuard no_grad;
  const DTensor replica = with_placement(DTensor(shard_), mesh_dim_, Replicate());
  return was_plain_ ? replica.to_local() : at::Tensor(replica);
}

}  // namespace tessera
