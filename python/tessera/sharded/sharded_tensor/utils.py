"""Arguments of torch's functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import GroupMember, distributed_c10d
from torch.distributed.remote_device import _remote_device


def _flatten_tensor_size(size: Sequence[Any]) -> torch.Size:
    """``(2, 3)`` and ``([2, 3],)`` alike."""
    dims = list(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else list(size)
    if not all(isinstance(dim, int) for dim in dims):
        raise TypeError(f"A size is a sequence of ints, but got {dims}.")
    return torch.Size(dims)


def _parse_and_validate_remote_device(
    pg: Any, remote_device: _remote_device | None
) -> tuple[int | None, torch.device]:
    """The global rank and the device that a placement names; the rank must be one of the group."""
    if remote_device is None:
        raise ValueError("The remote device is None: a shard needs a placement, such as 'rank:0/cpu'.")
    rank, worker = remote_device.rank(), remote_device.worker_name()
    if worker is not None:
        rpc: Any = torch._C._distributed_rpc
        if not rpc._is_current_rpc_agent_set():
            raise RuntimeError(f"RPC has to be initialized to know the worker '{worker}'.")
        ranks = {each.name: each.id for each in rpc._get_current_rpc_agent().get_worker_infos()}
        if worker not in ranks:
            raise ValueError(f"There is no worker '{worker}', only {sorted(ranks)}.")
        return ranks[worker], remote_device.device()
    if rank is not None and pg is not GroupMember.NON_GROUP_MEMBER:
        known = distributed_c10d.get_process_group_ranks(pg)
        if rank not in known:
            raise ValueError(f"Rank {rank} is not among the ranks {known} of the process group.")
    return rank, remote_device.device()
