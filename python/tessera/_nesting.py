"""What torch.distributed would wrap around our tensors is refused at once: it would fail later, or compute on a part as if it were all."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tessera import _C


def _refuse(what: str, instead: str) -> None:
    raise TypeError(f"{what} cannot take a distributed tensor of tessera. {instead}")


def _check(value: Any, what: str, instead: str) -> None:
    """Neither a tensor of ours, nor a module with one."""
    if isinstance(value, torch.nn.Module):
        for name, each in (*value.named_parameters(), *value.named_buffers()):
            if _C.is_dtensor(each):
                _refuse(f"{what} (here: {name} of {type(value).__name__})", instead)
    elif _C.is_dtensor(value):
        _refuse(what, instead)


def _checked(function: Callable[..., Any], position: int, what: str, instead: str) -> Callable[..., Any]:
    """The function, whose argument at that position is checked first."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[position : position + 1], *kwargs.values()):
            _check(value, what, instead)
        return function(*args, **kwargs)

    return checked


_CONVERT = "Convert it with tessera.to_torch, or use the function of the same name of tessera."


def teach_tensors(api: ModuleType) -> None:
    """Of torch.distributed.tensor."""
    kind: Any = api.DTensor
    kind.from_local = staticmethod(
        _checked(kind.from_local, 0, "torch.distributed.tensor.DTensor.from_local", _CONVERT)
    )
    for name in ("distribute_tensor", "distribute_module"):
        original = getattr(api, name)
        checked = _checked(original, 0, f"torch.distributed.tensor.{name}", _CONVERT)
        for path, module in list(sys.modules.items()):  # those that have it by its name already
            if path.startswith("torch.distributed") and getattr(module, name, None) is original:
                setattr(module, name, checked)


_FULLY_SHARD = "Use tessera.parallel.fully_shard, which takes the same arguments."


def teach_fully_shard(init: ModuleType) -> None:
    """Of FSDP2, which asks for each parameter."""
    original = init._verify_managed_param

    @functools.wraps(original)
    def _verify_managed_param(name: str, param: torch.nn.Parameter) -> None:
        if _C.is_dtensor(param):
            _refuse(f"torch.distributed.fsdp.fully_shard (here: {name})", _FULLY_SHARD)
        original(name, param)

    init._verify_managed_param = _verify_managed_param  # type: ignore[attr-defined]


def _teach_wrapper(kind: Any, name: str, instead: str) -> None:
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        _check(module, name, instead)
        original(self, module, *args, **kwargs)

    kind.__init__ = __init__


def teach_fsdp(module: ModuleType) -> None:
    kind = module.FullyShardedDataParallel
    _teach_wrapper(kind, "torch.distributed.fsdp.FullyShardedDataParallel", _FULLY_SHARD)


def teach_ddp(module: ModuleType) -> None:
    kind = module.DistributedDataParallel
    _teach_wrapper(kind, "torch.nn.parallel.DistributedDataParallel", "Use tessera.parallel.replicate.")
