"""Tensors whose shards are boxes on many ranks: any tiling, several boxes on a rank or none.

The names and modules are those of ``torch.distributed._shard``; the tensors are Tessera's, made in C++. Change the import:

    from tessera.sharded import shard_parameter, sharded_tensor
    from tessera.sharded.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    items = sharded_tensor.rand(spec, 10, 4)
    items.local_tensor()                       # this rank's rows, an ordinary tensor
    torch.nn.functional.embedding(indices, items)
"""

from tessera.sharded import metadata, sharded_optim, sharded_tensor, sharder, sharding_plan, sharding_spec
from tessera.sharded._bridge import from_dtensor, from_torch, reshard, to_dtensor, to_torch
from tessera.sharded.api import _shard_tensor, load_with_process_group, shard_module, shard_parameter
from tessera.sharded.metadata import ShardMetadata
from tessera.sharded.sharded_optim import ShardedOptimizer, named_params_with_sharded_tensor
from tessera.sharded.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    TensorProperties,
    custom_sharded_op_impl,
    init_from_local_shards,
    pre_load_state_dict_hook,
    state_dict_hook,
)
from tessera.sharded.sharder import Sharder
from tessera.sharded.sharding_plan import ShardingPlan, ShardingPlanner
from tessera.sharded.sharding_spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
)

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "_shard_tensor",
    "custom_sharded_op_impl",
    "from_dtensor",
    "from_torch",
    "init_from_local_shards",
    "load_with_process_group",
    "metadata",
    "named_params_with_sharded_tensor",
    "pre_load_state_dict_hook",
    "reshard",
    "shard_module",
    "shard_parameter",
    "sharded_optim",
    "sharded_tensor",
    "sharder",
    "sharding_plan",
    "sharding_spec",
    "state_dict_hook",
    "to_dtensor",
    "to_torch",
]
