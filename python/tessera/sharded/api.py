"""Sharding tensors, parameters and modules."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from tessera import _C
from tessera.sharded.sharded_tensor import ShardedTensor
from tessera.sharded.sharded_tensor.api import adopt
from tessera.sharded.sharder import Sharder
from tessera.sharded.sharding_plan import ShardingPlan
from tessera.sharded.sharding_spec import ChunkShardingSpec, ShardingSpec


def _shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> ShardedTensor:
    """Each rank gets its shards of what the ``src_rank``-th rank of the group has. Collective. Raises, on every rank, if the ranks do not give
    the same arguments, or the tensor is not contiguous."""
    return adopt(_C.shard_tensor(tensor, sharding_spec, src_rank, process_group, is_checked=True))


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Any = None,
) -> None:
    """Replace a parameter of the module itself by a sharded one. Collective. See :func:`_shard_tensor`."""
    if not hasattr(module, param_name):
        raise AttributeError(f"{type(module).__name__} has no attribute '{param_name}'.")
    tensor = getattr(module, param_name)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{type(module).__name__}.{param_name} is not a tensor, but a {type(tensor).__name__}."
        )
    sharded = _shard_tensor(tensor, sharding_spec, src_rank, process_group)
    module.register_parameter(param_name, nn.Parameter(sharded, requires_grad=tensor.requires_grad))


class _Loading(threading.local):
    """Ranks may be threads."""

    groups: tuple[Any, ...] = ()


_loading = _Loading()


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """While entered, sharded tensors that the calling thread unpickles are shared by these ranks, instead of by all."""
    if _loading.groups:
        raise RuntimeError("load_with_process_group is entered already: it cannot be nested.")
    _loading.groups = (process_group,)
    try:
        yield process_group
    finally:
        _loading.groups = ()


def _current_group() -> Any:
    """What load_with_process_group says; None: all ranks."""
    return _loading.groups[0] if _loading.groups else None


def _get_current_process_group() -> Any:
    group = _current_group()
    return dist.group.WORLD if group is None else group


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Reshard the sharded tensors that the module returns; anything else is left as it is."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, ShardedTensor):
            return adopt(_C.reshard(output, resharding_spec, in_place=False))
        return output

    module.register_forward_hook(hook)
    return module


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Return a sharded tensor that the module returns as its local tensor, without the dim that is sharded into chunks if that has size 1
    there: of a [4, 16] tensor on four ranks each gets a [16]."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        local, spec = output.local_tensor(), output.sharding_spec()
        if isinstance(spec, ChunkShardingSpec) and local.size(spec.dim) == 1:
            return local.squeeze(spec.dim)
        return local

    module.register_forward_hook(hook)
    return module


def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: Any = None) -> None:
    """Shard a module as the plan says. Collective. Nothing has changed if the plan itself is wrong."""
    _check_plan(module, plan)
    for name, entry in plan.plan.items():
        parent, _, leaf = name.rpartition(".")
        if isinstance(entry, ShardingSpec):
            shard_parameter(module.get_submodule(parent), leaf, entry, src_rank, process_group)
        else:
            setattr(module.get_submodule(parent), leaf, entry.shard(module.get_submodule(name)))
    for name, spec in (plan.output_plan or {}).items():
        _reshard_output(module.get_submodule(name), spec)
    for name in plan.return_local_tensor or ():
        _collect_local_shard(module.get_submodule(name))


def _check_plan(module: nn.Module, plan: ShardingPlan) -> None:
    sharders = [name for name, entry in plan.plan.items() if isinstance(entry, Sharder)]
    for name, entry in plan.plan.items():
        if isinstance(entry, Sharder):
            if name == "":
                raise KeyError("A Sharder replaces a module in its parent: its name in a plan is not empty.")
            module.get_submodule(name)
        elif isinstance(entry, ShardingSpec):
            parent = name.rpartition(".")[0]
            for sharder in sharders:
                if f"{parent}.".startswith(f"{sharder}."):
                    raise RuntimeError(
                        f"The plan shards the parameter '{name}', but also gives '{sharder}', which it is in, to a Sharder."
                    )
            module.get_submodule(parent)
        else:
            raise TypeError(
                f"'{name}' in the plan is a {type(entry).__name__}; expected a ShardingSpec or a Sharder."
            )
    for name, spec in (plan.output_plan or {}).items():
        if not isinstance(spec, ShardingSpec):
            raise TypeError(
                f"'{name}' in the output_plan is a {type(spec).__name__}; expected a ShardingSpec."
            )
