"""How to shard a module."""

import abc
from dataclasses import dataclass

from torch import nn

from tessera.sharded.sharder import Sharder
from tessera.sharded.sharding_spec import ShardingSpec


@dataclass
class ShardingPlan:
    """``plan``: specs by the names of parameters, sharders by the names of modules. ``output_plan``: the sharding of module outputs that
    are sharded tensors. ``return_local_tensor``: modules whose sharded outputs are returned as the local tensor. "" is the root."""

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(abc.ABC):
    """Makes plans."""

    @abc.abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """How to shard this module."""
