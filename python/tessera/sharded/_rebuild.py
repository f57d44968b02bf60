"""What pickles of sharded tensors call. Its names and arguments are a format: do not change them."""

from typing import Any

import torch
from torch import distributed as dist

from tessera import _C, _world
from tessera.sharded import api
from tessera.sharded.sharded_tensor.api import ShardedTensor
from tessera.sharded.sharded_tensor.metadata import ShardedTensorMetadata
from tessera.sharded.sharded_tensor.shard import Shard
from tessera.sharded.sharding_spec.api import ShardingSpec


def _ranks_and_sizes(process_group: Any) -> tuple[int, int, int, int]:
    """This rank in the group and in the world, and how many each has; -1 outside of the group."""
    rank, size = _C.get_rank(), _C.get_world_size()
    if process_group is None:
        return rank, rank, size, size
    if isinstance(process_group, int):  # torch.distributed.GroupMember.NON_GROUP_MEMBER
        return -1, rank, -1, size
    if isinstance(process_group, (list, tuple)):
        group_rank = process_group.index(rank) if rank in process_group else -1
        return group_rank, rank, len(process_group) if group_rank >= 0 else -1, size
    return process_group.rank(), rank, process_group.size(), size


def reduce_sharded_tensor(tensor: ShardedTensor) -> tuple[Any, tuple[Any, ...]]:
    shards = [(local, metadata) for local, metadata in _C.local_shards(tensor)]
    return rebuild_sharded_tensor, (
        shards,
        tensor.metadata(),
        tensor.sharding_spec(),
        tensor._init_rrefs,
        _ranks_and_sizes(tensor._process_group),
        getattr(tensor, "_is_param", False),
    )


def rebuild_sharded_tensor(
    shards: list[tuple[torch.Tensor, Any]],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    init_rrefs: bool,
    ranks_and_sizes: tuple[int, int, int, int],
    is_parameter: bool,
) -> ShardedTensor:
    """The tensor on the same rank of as many, of the group of ``load_with_process_group``, else of all."""
    if not _C.is_rank_thread() and not dist.is_initialized():
        raise RuntimeError(
            "A sharded tensor is loaded on the ranks that it was saved on: start them, or call "
            "torch.distributed.init_process_group(), first. tessera.checkpoint saves and loads on any ranks."
        )
    _world.ensure()
    process_group = api._current_group()
    names = ("Local rank", "Global rank", "Local world size", "Global world size")
    for name, saved, now in zip(names, ranks_and_sizes, _ranks_and_sizes(process_group)):
        if saved != now:
            raise RuntimeError(
                f"{name} at save time was {saved}, but at load time it is {now}. tessera.checkpoint saves and loads on any ranks."
            )
    made = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(tensor, each) for tensor, each in shards],
        metadata,
        process_group=process_group,
        init_rrefs=init_rrefs,
        sharding_spec=spec,
    )
    if is_parameter:
        made._is_param = True
    return made


torch.serialization.add_safe_globals([rebuild_sharded_tensor])
