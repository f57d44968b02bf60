"""How tensors are split, and whether shards make one."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.remote_device import _remote_device

from tessera import _C
from tessera.sharded.metadata import ShardMetadata


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Raise ValueError, naming two shards and an element that both hold, if any two overlap."""
    _C.validate_non_overlapping_shards(shards)


def check_tensor(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Raise ValueError unless the shards, which do not overlap, are together all of a tensor of that size."""
    _C.check_shards_cover(shards_metadata, tensor_dims)


def get_split_size(dim_size: int, chunks: int) -> int:
    """The size of all chunks but the last ones, as ``torch.chunk`` splits a dim."""
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The size of one chunk."""
    return max(min(split_size, dim_size - split_size * idx), 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: Any, rank: int
) -> tuple[int, int]:
    """Where the chunk of a rank begins, and its size."""
    split_size = get_split_size(sharding_dim_size, world_size)
    for idx, placement in enumerate(spec.placements):
        if _remote_device(str(placement)).rank() == rank:
            return min(split_size * idx, sharding_dim_size), get_chunked_dim_size(
                sharding_dim_size, split_size, idx
            )
    raise ValueError(f"Rank {rank} has no chunk under {spec}.")
