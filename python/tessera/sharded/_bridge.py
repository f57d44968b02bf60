"""To and from the other distributed tensors, without copying where the layout allows it. Gradients flow through."""

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tessera import _C
from tessera.sharded.sharded_tensor import ShardedTensor, TensorProperties
from tessera.sharded.sharded_tensor.api import adopt
from tessera.sharded.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor


def reshard(tensor: torch.Tensor, spec: ShardingSpec) -> ShardedTensor:
    """The same tensor sharded by another spec; ``tensor`` stays as it is. Collective. Differentiable, if all ranks run backward."""
    return adopt(_C.reshard(tensor, spec, in_place=False))


def to_dtensor(
    tensor: torch.Tensor,
    device_mesh: _C.DeviceMesh | None = None,
    placements: Sequence[_C.Placement] | None = None,
) -> torch.Tensor:
    """The same tensor as a distributed one, placed so. Its local tensor is this rank's shard, without copying, if every rank has in one shard
    what the placements give it; else the tensor is resharded so first. Collective.

    By default on the 1-d mesh of the tensor's ranks, in the order of their chunks if it has one chunk for each; else sharded along dim 0.
    """
    return _C.sharded_to_dtensor(tensor, device_mesh, placements)


def from_dtensor(tensor: torch.Tensor) -> ShardedTensor:
    """A distributed tensor, of ours or of ``torch.distributed.tensor``, as a sharded one: what a rank holds is its shard, without copying where it
    is one contiguous box. Of replicas the first is taken. Raises if the tensor is partial: reduce it first."""
    if not _C.is_dtensor(tensor):
        from tessera._bridge import from_torch as dtensor_from_torch

        tensor = dtensor_from_torch(tensor)  # type: ignore[arg-type]
    return adopt(_C.dtensor_to_sharded(tensor))


def is_torch(tensor: torch.Tensor) -> bool:
    """Whether it is a sharded tensor of ``torch.distributed._shard``, whose import takes long."""
    reference = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return reference is not None and isinstance(tensor, reference.ShardedTensor)


def from_torch(tensor: "TorchShardedTensor") -> ShardedTensor:
    """The same tensor as Tessera's, on the same local tensors and group. Not collective."""
    metadata: Any = tensor.metadata()
    shards: Any = tensor.local_shards()
    spec: Any = tensor.sharding_spec()
    if shards:
        metadata = type(metadata)(
            metadata.shards_metadata, metadata.size, TensorProperties.create_from_tensor(shards[0].tensor)
        )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        metadata,
        process_group=tensor._process_group,
        sharding_spec=spec,
    )


def to_torch(tensor: ShardedTensor) -> "TorchShardedTensor":
    """The same tensor as one of ``torch.distributed._shard``, on the same local tensors and group. Not collective."""
    reference: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
    specs: Any = importlib.import_module("torch.distributed._shard.sharding_spec")

    if _C.is_rank_thread():
        raise RuntimeError(
            "to_torch: torch.distributed knows only ranks that are processes, but these are threads of tessera.run."
        )

    def shard(ours: Any) -> Any:
        return specs.ShardMetadata(ours.shard_offsets, ours.shard_sizes, ours.placement)

    ours, spec = tensor.metadata(), tensor.sharding_spec()
    how: Any = spec
    if isinstance(spec, ChunkShardingSpec):
        how = specs.ChunkShardingSpec(spec.dim, list(spec.placements))
    elif isinstance(spec, EnumerableShardingSpec):
        how = specs.EnumerableShardingSpec([shard(each) for each in spec.shards])
    else:
        how = None  # torch finds one for the shards
    properties = ours.tensor_properties
    metadata = reference.ShardedTensorMetadata(
        [shard(each) for each in ours.shards_metadata],
        ours.size,
        reference.TensorProperties(
            properties.dtype,
            properties.layout,
            properties.requires_grad,
            properties.memory_format,
            properties.pin_memory,
        ),
    )
    made: TorchShardedTensor = reference.ShardedTensor._init_from_local_shards_and_global_metadata(
        [reference.Shard(each.tensor, shard(each.metadata)) for each in tensor.local_shards()],
        metadata,
        process_group=tensor._process_group,
        sharding_spec=how,
    )
    return made
