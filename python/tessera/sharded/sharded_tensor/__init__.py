"""Making sharded tensors, saving them with modules, and operators of one's own."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from tessera.sharded.metadata import ShardMetadata
from tessera.sharded.op_registry_utils import _decorator_func
from tessera.sharded.sharded_tensor.api import (
    _CUSTOM_SHARDED_OPS,
    _SHARDED_OPS,
    ShardedTensor,
    ShardedTensorBase,
    make,
)
from tessera.sharded.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from tessera.sharded.sharded_tensor.shard import Shard
from tessera.sharded.sharding_spec.api import ShardingSpec

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "state_dict_hook",
    "zeros",
]


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """A tensor whose values are not set. ``options`` of all these functions: those of :class:`ShardedTensor`."""
    return make("empty", sharding_spec, size, **options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    return make("full", sharding_spec, size, 1, **options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    return make("full", sharding_spec, size, 0, **options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Any) -> ShardedTensor:
    return make("full", sharding_spec, (size,), fill_value, **options)


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Uniform in [0, 1). The numbers depend on the seed and the call, not on the spec (docs/random.md)."""
    return make("rand", sharding_spec, size, **options)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Normal. The numbers depend on the seed and the call, not on the spec (docs/random.md)."""
    return make("randn", sharding_spec, size, **options)


def init_from_local_shards(
    local_shards: list[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """The tensor of which each rank holds these shards. See :meth:`ShardedTensor._init_from_local_shards`."""
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add the sharded tensors that are attributes of modules, but no parameters, to a state dict:
    ``module._register_state_dict_hook(state_dict_hook)``."""
    for path, submodule in module.named_modules(prefix=prefix.rstrip(".")):
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor):
                destination[f"{path}.{name}" if path else name] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Put such sharded tensors of a state dict into the module: ``module._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)``."""
    for path, submodule in module.named_modules(prefix=prefix.rstrip(".")):
        for name in list(vars(submodule)):
            value = state_dict.get(f"{path}.{name}" if path else name)
            if isinstance(value, ShardedTensor):
                setattr(submodule, name, value)


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an implementation of a torch function, which is called where one of its arguments is a sharded tensor.

        @custom_sharded_op_impl(torch.nn.functional.linear)
        def my_sharded_linear(types, args, kwargs, process_group): ...

    ``types``, ``args``, ``kwargs``: as ``__torch_function__`` has them. For all threads, from now on; all ranks must do so alike.
    """
    return functools.partial(_decorator_func, op=func, op_table=_CUSTOM_SHARDED_OPS)


def _sharded_op_impl(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but used only where users have registered none."""
    return functools.partial(_decorator_func, op=func, op_table=_SHARDED_OPS)
