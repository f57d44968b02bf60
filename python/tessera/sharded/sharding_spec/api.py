"""How tensors are split into shards, and which rank and device has each."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.remote_device import _remote_device

from tessera import _C
from tessera.sharded.metadata import ShardMetadata
from tessera.sharded.op_registry_utils import Table, _decorator_func
from tessera.sharded.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

if TYPE_CHECKING:
    from tessera.sharded.sharded_tensor import ShardedTensor


class PlacementSpec(ABC):  # noqa: B024
    """The device of something that is not sharded. Derive from it to define your own."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """On one device."""

    device: _remote_device

    def __post_init__(self) -> None:
        if not isinstance(self.device, _remote_device):
            self.device = _remote_device(self.device)


class ShardingSpec(ABC):
    """How a tensor is sharded. Derive from it to define your own: what works on any tiling works on yours."""

    @abstractmethod
    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """All shards of a tensor of that size. It is checked where it is used."""

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> "ShardedTensor":
        """Shard the tensor of the ``src_rank``-th rank of the group and scatter the shards. Collective. The other ranks give tensors of the
        same size and dtype, whose values do not count."""
        from tessera.sharded.sharded_tensor.api import adopt, ranks_argument

        return adopt(_C.shard_tensor(tensor, self, src_rank, ranks_argument(process_group), is_checked=False))


#: Implementations for the tensors of one class of specs, by its qualified name.
_CUSTOM_SHARDING_SPEC_OPS: dict[str, Table] = {}


def _has_custom_op(sharding_spec: ShardingSpec, op: Callable[..., Any]) -> bool:
    return op in _CUSTOM_SHARDING_SPEC_OPS.get(type(sharding_spec).__qualname__, {})


def _dispatch_custom_op(
    sharding_spec: ShardingSpec,
    op: Callable[..., Any],
    types: Any,
    args: Any,
    kwargs: Any,
    process_group: Any,
) -> Any:
    return _CUSTOM_SHARDING_SPEC_OPS[type(sharding_spec).__qualname__][op](types, args, kwargs, process_group)


def custom_sharding_spec_op(sharding_spec_class: type, func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an implementation of a torch function for tensors whose spec is of this class.

    @custom_sharding_spec_op(ChunkShardingSpec, torch.nn.functional.linear)
    def sharded_linear(types, args, kwargs, process_group): ...
    """
    table = _CUSTOM_SHARDING_SPEC_OPS.setdefault(sharding_spec_class.__qualname__, {})
    return functools.partial(_decorator_func, op=func, op_table=table)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Names every shard. None may overlap."""

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        if len(self.shards) == 0:
            raise ValueError("An EnumerableShardingSpec needs at least one shard.")
        _C.validate_non_overlapping_shards(self.shards)

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        """All shards of a tensor of that size."""
        return _C.build_sharded_metadata(self, tensor_sizes, tensor_properties)


def _infer_sharding_spec_from_shards_metadata(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The spec that gives these shards: a ChunkShardingSpec if there is one, else an EnumerableShardingSpec."""
    return _C.infer_sharding_spec(shards_metadata)


torch.serialization.add_safe_globals([EnumerableShardingSpec])
