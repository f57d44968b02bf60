"""Keep what backward needs of a module's forward in shards."""

from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera._api import DTensor
from tessera._C import DeviceMesh, Replicate, Shard


def input_reshard(
    module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Let each rank keep, of what ``module`` saves for backward and all ranks have, only its shard; return the module.

    Backward gathers it when it needs it: memory for communication. What all ranks have are distributed tensors that are replicated, and the
    plain tensors that the module is called with. ``tp_device_mesh``: of one dim. ``input_reshard_dim``: along which they are sharded; with None
    nothing is done.
    """
    if input_reshard_dim is None:
        return module
    if tp_device_mesh.ndim != 1:
        raise ValueError(
            f'input_reshard: expected a mesh of one dim, such as mesh["tp"], got {tp_device_mesh}.'
        )
    dim = input_reshard_dim
    entered: list[torch.autograd.graph.saved_tensors_hooks] = []

    def before(each: nn.Module, args: Any) -> None:
        inputs = {
            value.untyped_storage().data_ptr()
            for value in args
            if isinstance(value, torch.Tensor) and not _C.is_dtensor(value)
        }

        def on_all_ranks(tensor: torch.Tensor) -> bool:
            if _C.is_dtensor(tensor):
                return _C.device_mesh(tensor) == tp_device_mesh and _C.placements(tensor) == (Replicate(),)
            return tensor.untyped_storage().data_ptr() in inputs

        def pack(tensor: torch.Tensor) -> Any:
            if (
                isinstance(tensor, nn.Parameter)
                or not -tensor.ndim <= dim < tensor.ndim
                or not on_all_ranks(tensor)
            ):
                return tensor
            return _Sharded(tensor, tp_device_mesh, dim)

        entered.append(
            torch.autograd.graph.saved_tensors_hooks(
                pack, lambda kept: kept.gathered() if isinstance(kept, _Sharded) else kept
            )
        )
        entered[-1].__enter__()

    def after(each: nn.Module, args: Any, outputs: Any) -> None:
        if entered:  # else a hook before ours failed
            entered.pop().__exit__()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
    return module


class _Sharded:
    """This rank's shard of a tensor that all ranks had."""

    def __init__(self, tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> None:
        self._was_plain = not _C.is_dtensor(tensor)
        replica: Any = DTensor.from_local(tensor.detach(), mesh) if self._was_plain else tensor.detach()
        self._shard = replica.redistribute(
            placements=[Shard(dim)]
        ).clone()  # a view would keep all of it alive

    def gathered(self) -> torch.Tensor:
        """The tensor again. All ranks must call it."""
        replica: Any = self._shard.redistribute(placements=[Replicate()])
        return replica.to_local() if self._was_plain else replica  # type: ignore[no-any-return]
