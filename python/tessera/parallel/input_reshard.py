"""Keep what backward needs of a module's forward in shards."""

from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera._C import DeviceMesh


def input_reshard(
    module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Let each rank keep, of what ``module`` saves for backward and all ranks have, only its shard; return the module.

    Backward gathers it when it needs it: memory for communication. What all ranks have are distributed tensors that are replicated, and the
    plain tensors that the module is called with; those of one dim are left alone. ``tp_device_mesh``: of one dim. ``input_reshard_dim``:
    along which they are sharded; with None nothing is done.
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

        def pack(tensor: torch.Tensor) -> Any:
            is_replica = not _C.is_dtensor(tensor) and tensor.untyped_storage().data_ptr() in inputs
            return _C.SavedShard.of(tensor, tp_device_mesh, dim, is_replica) or tensor

        entered.append(
            torch.autograd.graph.saved_tensors_hooks(
                pack, lambda kept: kept.gathered() if isinstance(kept, _C.SavedShard) else kept
            )
        )
        entered[-1].__enter__()

    def after(each: nn.Module, args: Any, outputs: Any) -> None:
        if entered:  # else a hook before ours failed
            entered.pop().__exit__()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
    return module
