"""Sharding a module by a code of one's own."""

import abc

from torch import nn


class Sharder(abc.ABC):
    """Shards a module as a spec cannot. An entry of a :class:`~tessera.sharded.sharding_plan.ShardingPlan`."""

    @abc.abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The sharded version of a module: itself, changed, or another one that replaces it in its parent."""
