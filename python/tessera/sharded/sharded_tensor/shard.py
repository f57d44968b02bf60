"""One box of a sharded tensor with its data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessera import _C
from tessera.sharded.metadata import ShardMetadata


@dataclass(slots=True)
class Shard:
    """The tensor must have the size that the metadata says, and lie on the device of its placement, if it has one."""

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        _C.check_shard(self.tensor, self.metadata)

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> "Shard":
        """A shard of the size and on the device of ``tensor``, at these offsets, of that global rank."""
        return Shard(
            tensor, ShardMetadata(shard_offsets, list(tensor.size()), f"rank:{rank}/{tensor.device}")
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.tensor, self.metadata)


class LocalShard(Shard):
    """A shard that a sharded tensor has on this rank: assigning another tensor to ``tensor`` changes the sharded one."""

    __slots__ = ("_index", "_owner", "_tensor")

    def __init__(
        self, owner: torch.Tensor, index: int, tensor: torch.Tensor, metadata: ShardMetadata
    ) -> None:
        self._owner = owner
        self._index = index
        self._tensor = tensor
        self.metadata = metadata

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        _C.set_local_tensor(self._owner, self._index, tensor)
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shard):
            return NotImplemented
        return bool(torch.equal(self.tensor, other.tensor)) and self.metadata == other.metadata

    __hash__ = None  # type: ignore[assignment]


torch.serialization.add_safe_globals([Shard])
