"""How to shard a module."""

from tessera.sharded.sharding_plan.api import ShardingPlan, ShardingPlanner

__all__ = ["ShardingPlan", "ShardingPlanner"]
