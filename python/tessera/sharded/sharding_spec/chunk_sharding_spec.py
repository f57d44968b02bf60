"""One dim in chunks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.remote_device import _remote_device

from tessera import _C
from tessera.sharded.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from tessera.sharded.sharding_spec.api import ShardingSpec


@dataclass(init=False)
class ChunkShardingSpec(ShardingSpec):
    """One dim (negative counts from the end) in as many chunks as there are placements, as ``torch.chunk`` splits it. A rank may have
    several placements."""

    dim: int
    placements: list[_remote_device]

    def __init__(self, dim: int, placements: list[Any]) -> None:
        if isinstance(dim, str):
            raise NotImplementedError("ChunkShardingSpec does not support named dims: give their position.")
        if not isinstance(dim, int):
            raise ValueError(f"The dim of a ChunkShardingSpec is an int, but got {dim!r}.")
        self.dim = dim
        self.placements = [
            each if isinstance(each, _remote_device) else _remote_device(each) for each in placements
        ]

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """All shards of a tensor of that size."""
        return _C.build_sharded_metadata(self, tensor_sizes, tensor_properties)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkShardingSpec, (self.dim, [str(each) for each in self.placements])


torch.serialization.add_safe_globals([ChunkShardingSpec])
