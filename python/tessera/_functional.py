"""torch.distributed._functional_collectives on our meshes, and on ranks that are threads."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from tessera import _C


def _group_of(group: Any) -> ProcessGroup | None:
    """The group that is meant by a mesh of ours of one dim, a mesh and a dim of it, or a group of ranks that are threads; else None."""
    if isinstance(group, _C.DeviceMesh):
        if group.ndim != 1:
            raise AssertionError(
                f"A functional collective is along one mesh dim, but {group} has {group.ndim}: give (mesh, dim) or a slice of the mesh."
            )
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], _C.DeviceMesh):
        return group[0].get_group(group[1])
    if isinstance(group, ProcessGroup) and _C.is_rank_thread():
        return group
    if isinstance(group, list) and _C.is_rank_thread():
        raise ValueError(
            "Ranks that are threads of tessera.run have no groups by lists of ranks: give a mesh, a mesh and a dim, or a group."
        )
    return None


def teach(collectives: ModuleType) -> None:
    """Let all functions of the module, which find their group in one place, take ours."""
    original: Any = collectives._resolve_group
    permute: Any = collectives.permute_tensor

    @functools.wraps(original)
    def _resolve_group(group: Any, tag: str = "") -> Any:
        ours = _group_of(group)
        return original(group, tag) if ours is None else _C.registered_name(ours)

    @functools.wraps(permute)
    def permute_tensor(self: torch.Tensor, src_dst: list[int], group: Any, tag: str = "") -> torch.Tensor:
        ours = _group_of(group)
        if ours is None:
            return permute(self, src_dst, group, tag)  # type: ignore[no-any-return]
        me, count = ours.rank(), self.numel()
        to = [count if src_dst[me] == rank else 0 for rank in range(ours.size())]
        of = [count if src_dst[rank] == me else 0 for rank in range(ours.size())]
        return collectives.all_to_all_single(self, of, to, group, tag)  # type: ignore[no-any-return]

    collectives._resolve_group = _resolve_group  # type: ignore[attr-defined]
    collectives.permute_tensor = permute_tensor  # type: ignore[attr-defined]


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional collective returned, as the tensor that it becomes when it is done; any other tensor as it is. Differentiable."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor

    result: torch.Tensor = wait_tensor(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor  # type: ignore[no-untyped-call]
    return result
