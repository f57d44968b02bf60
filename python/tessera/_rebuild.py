"""What pickles call. Their names and arguments are a format: do not change them."""

from typing import Any

import torch

from tessera import _C


def rebuild_placement(text: str) -> _C.Placement:
    return _C.parse_placement(text)


def rebuild_mesh(device_type: str, shape: list[int], ranks: list[int], names: list[str]) -> _C.DeviceMesh:
    """The mesh on the ranks of whoever unpickles it."""
    return _C.DeviceMesh(
        device_type, torch.tensor(ranks, dtype=torch.int64).reshape(shape), mesh_dim_names=names or None
    )


def rebuild_dtensor(local: torch.Tensor, mesh: _C.DeviceMesh, context: str) -> torch.Tensor:
    return _C.unflatten(local, mesh, context)


def reduce_dtensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    local, context = _C.flatten(tensor.detach())
    if tensor.requires_grad:
        context += " requires_grad"
    return rebuild_dtensor, (local, _C.device_mesh(tensor), context)


torch.serialization.add_safe_globals([rebuild_placement, rebuild_mesh, rebuild_dtensor])
