"""Sharding rules of one's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tessera import _C

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class TensorSpec:
    """Everything known about a distributed tensor but its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[_C.Placement, ...]
    mesh: _C.DeviceMesh

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return len(self.shape)


def register_sharding(
    op: torch._ops.OpOverload | Sequence[torch._ops.OpOverload],
) -> Callable[[_Function], _Function]:
    """Make the decorated function the sharding rule of an operator, or of several, which may be of any library.

    The function is called with the operator's arguments, in order, with a :class:`TensorSpec` for each tensor. It returns what is valid on one mesh dim: pairs of the
    placements of the results and those of the arguments, with None for what is no tensor. That everything may be replicated goes without saying. The cheapest is
    chosen for each mesh dim.

        @register_sharding(torch.ops.aten._softmax.default)
        def softmax_sharding(x, dim, half_to_float):
            return [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim % x.ndim]

    It takes effect for calls from now on, on all ranks of this process; all ranks must register the same.
    """
    ops = [op] if isinstance(op, torch._ops.OpOverload) else list(op)
    for each in ops:
        if not isinstance(each, torch._ops.OpOverload):
            raise TypeError(
                f"register_sharding: expected an operator such as torch.ops.aten.mm.default, got {each!r}."
            )

    def register(function: _Function) -> _Function:
        for each in ops:
            _C.register_sharding(each._schema.name, each._schema.overload_name, function)
        return function

    return register
