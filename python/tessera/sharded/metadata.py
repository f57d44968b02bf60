"""What is known of a shard without its data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.remote_device import _remote_device


@dataclass(init=False, slots=True)
class ShardMetadata:
    """A box of the global tensor, and the rank and device that have it: ``"rank:1/cuda:0"``, ``"worker1/cpu"``."""

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: _remote_device | None

    def __init__(
        self,
        shard_offsets: Sequence[int],
        shard_sizes: Sequence[int],
        placement: str | _remote_device | None = None,
    ) -> None:
        self.shard_offsets = shard_offsets  # type: ignore[assignment]
        self.shard_sizes = shard_sizes  # type: ignore[assignment]
        self.placement = _remote_device(placement) if isinstance(placement, str) else placement
        if len(shard_offsets) != len(shard_sizes):
            raise ValueError(
                f"A shard has as many shard_offsets as shard_sizes, but got {len(shard_offsets)} and {len(shard_sizes)}."
            )
        if any(each < 0 for each in (*shard_offsets, *shard_sizes)):
            raise ValueError(
                f"shard_offsets and shard_sizes are 0 or more, but got {shard_offsets} and {shard_sizes}."
            )

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes, self.placement))

    def __reduce__(self) -> tuple[Any, ...]:
        placement = None if self.placement is None else str(self.placement)
        return ShardMetadata, (list(self.shard_offsets), list(self.shard_sizes), placement)


torch.serialization.add_safe_globals([ShardMetadata])
