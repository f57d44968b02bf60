"""Optimisers on local shards."""

from collections.abc import Iterator

import torch
from torch import nn

from tessera.sharded.sharded_optim.api import ShardedOptimizer
from tessera.sharded.sharded_tensor import ShardedTensor

__all__ = ["ShardedOptimizer", "named_params_with_sharded_tensor"]


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters of a module, and the sharded tensors that are attributes of modules, each once, by name."""
    known = set()
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    for path, submodule in modules:
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor) and value not in known:
                known.add(value)
                yield f"{path}.{name}" if path else name, value
    yield from module.named_parameters(prefix=prefix, recurse=recurse)
