"""To and from torch.distributed.tensor, without copying."""

from typing import TYPE_CHECKING, Any

import torch

from tessera import _C
from tessera._api import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.tensor import DTensor as TorchDTensor


def mesh_from_torch(mesh: "TorchMesh") -> _C.DeviceMesh:
    """The same mesh as Tessera's; it uses the same groups."""
    groups = mesh.get_all_groups() if mesh.get_coordinate() is not None else []
    return _C.DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def mesh_to_torch(mesh: _C.DeviceMesh) -> "TorchMesh":
    """The same mesh as ``torch.distributed``'s; it uses the same groups."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    if _C.is_rank_thread():
        raise RuntimeError(
            "to_torch: torch.distributed knows only ranks that are processes, but these are threads of tessera.run."
        )
    groups: list[Any] = mesh.get_all_groups()
    if mesh.ndim == 1:
        return TorchMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    return TorchMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def from_torch(tensor: "TorchDTensor", device_mesh: _C.DeviceMesh | None = None) -> torch.Tensor:
    """The same tensor as Tessera's, on the same memory and groups. Gradients flow through. Of ``torch.distributed._shard``'s too.

    ``device_mesh``: what ``mesh_from_torch(tensor.device_mesh)`` gave before, to have many tensors on one mesh.
    """
    from tessera.sharded import _bridge

    if _bridge.is_torch(tensor):
        return _bridge.from_torch(tensor)  # type: ignore[arg-type]
    spec = tensor._spec
    if spec.shard_order is not None and spec.shard_order != spec.compute_default_shard_order(spec.placements):
        raise NotImplementedError(f"from_torch: {spec} has an explicit shard order; redistribute it first.")
    mesh = mesh_from_torch(tensor.device_mesh) if device_mesh is None else device_mesh
    return DTensor.from_local(
        tensor.to_local(),
        mesh,
        tensor.placements,  # type: ignore[arg-type]
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def to_torch(tensor: torch.Tensor, device_mesh: "TorchMesh | None" = None) -> "TorchDTensor":
    """A distributed tensor as one of ``torch.distributed.tensor``, a sharded one as one of ``torch.distributed._shard``, on the same memory and
    groups. Gradients flow through.

    ``device_mesh``: what ``mesh_to_torch(tensor.device_mesh)`` gave before, to have many tensors on one mesh.
    """
    if _C.is_sharded_tensor(tensor):
        from tessera.sharded import _bridge

        return _bridge.to_torch(tensor)  # type: ignore[arg-type, return-value]
    from torch.distributed import tensor as reference
    from torch.distributed.tensor.placement_types import _StridedShard

    def placement(ours: _C.Placement) -> Any:
        if ours.is_replicate():
            return reference.Replicate()
        if isinstance(ours, _C._StridedShard):
            return _StridedShard(ours.dim, split_factor=ours.split_factor)
        if isinstance(ours, _C.Shard):
            return reference.Shard(ours.dim)
        assert isinstance(ours, _C.Partial)
        return reference.Partial(ours.reduce_op)

    mesh = mesh_to_torch(_C.device_mesh(tensor)) if device_mesh is None else device_mesh
    placements = [placement(each) for each in _C.placements(tensor)]
    return reference.DTensor.from_local(
        _C.to_local(tensor, None),
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
