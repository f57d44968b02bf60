"""How to shard a tensor."""

from tessera.sharded.metadata import ShardMetadata
from tessera.sharded.sharding_spec.api import (
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    _infer_sharding_spec_from_shards_metadata,
)
from tessera.sharded.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
]
