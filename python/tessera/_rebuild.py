"""What pickles call. Their names and arguments are a format: do not change them."""

from dataclasses import dataclass
from typing import Any

import torch

from tessera import _C, _world


@dataclass(frozen=True)
class MeshDescription:
    """A mesh that was loaded where there are no ranks."""

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None


@dataclass(frozen=True)
class DTensorDescription:
    """A distributed tensor that was loaded where there are no ranks: what the rank that saved it held of it."""

    local_tensor: torch.Tensor
    device_mesh: MeshDescription
    placements: tuple[_C.Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool

    def to_local(self) -> torch.Tensor:
        return self.local_tensor


def rebuild_placement(text: str) -> _C.Placement:
    return _C.parse_placement(text)


def rebuild_mesh(
    device_type: str, shape: list[int], ranks: list[int], names: list[str]
) -> _C.DeviceMesh | MeshDescription:
    """The mesh on the ranks of whoever unpickles it, or what it was if there are none."""
    if not _world.ensure_if_any():
        return MeshDescription(device_type, tuple(shape), tuple(ranks), tuple(names) or None)
    return _C.DeviceMesh(
        device_type, torch.tensor(ranks, dtype=torch.int64).reshape(shape), mesh_dim_names=names or None
    )


def rebuild_dtensor(
    local: torch.Tensor, mesh: _C.DeviceMesh | MeshDescription, context: str
) -> torch.Tensor | DTensorDescription:
    if isinstance(mesh, MeshDescription):
        text = context.removesuffix(" requires_grad")
        placements, shape, stride = _C.parse_layout(text)
        return DTensorDescription(local, mesh, placements, torch.Size(shape), tuple(stride), text != context)
    return _C.unflatten(local, mesh, context)


def reduce_dtensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    local, context = _C.flatten(tensor.detach())
    if tensor.requires_grad:
        context += " requires_grad"
    return rebuild_dtensor, (local, _C.device_mesh(tensor), context)


torch.serialization.add_safe_globals([rebuild_placement, rebuild_mesh, rebuild_dtensor])
