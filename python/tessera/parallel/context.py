"""Attention over a sequence that is sharded."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from tessera import _C
from tessera._C import DeviceMesh, Shard
from tessera.parallel.style import ParallelStyle, _prepare

Method = Literal["allgather", "ulysses", "ring"]


@contextlib.contextmanager
def context_parallel(method: Method = "ring", *, zigzag: bool = False) -> Iterator[None]:
    """Inside, ``scaled_dot_product_attention`` over a sequence that is sharded is computed in that way.

    Queries, keys and values are distributed tensors of dims (batch, heads, length, size), with the length sharded; the output is sharded as the
    queries are. "allgather": each rank gathers all keys and values. "ulysses": an all-to-all shards heads instead of the sequence, and another
    one shards the output back. "ring": keys and values travel around the ranks, and none ever has all of them. Without this context the cheaper
    one of the first two is taken. A call that the method cannot do is an error that names those that can. Gradients, and what activation
    checkpointing computes again, are computed in the way of their forward, wherever ``backward`` is called.

    ``zigzag``: the sequence is in the order that :func:`to_zigzag` gives it, and ``is_causal`` goes by positions. Masks
    are to be in this order too.

        with context_parallel("ring"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)       # q, k, v: [Shard(2)]
    """
    scope = _C.ContextParallelScope(method, zigzag)
    scope.enter()
    try:
        yield
    finally:
        scope.exit()


def zigzag_order(length: int, ranks: int) -> torch.Tensor:
    """Which position each element of a sequence has in zig-zag order.

    Sharded along ``ranks`` ranks, each has one piece from the front and one from the back of the sequence, so that causal attention gives all
    of them the same work. ``zigzag_order(8, 2)`` is 0 1 6 7, 2 3 4 5.
    """
    return _C.zigzag_order(length, ranks)


def to_zigzag(tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """``tensor`` with the elements of ``dim`` in zig-zag order for so many ranks; plain or distributed. Reorder tokens, targets and position ids alike."""
    return _C.to_zigzag(tensor, dim, ranks)


def from_zigzag(tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Back from :func:`to_zigzag`."""
    return _C.from_zigzag(tensor, dim, ranks)


class ContextParallel(ParallelStyle):
    """Shard what a module is called with along its sequence, and compute the attention in it so; see :func:`context_parallel`.

    The module may be a layer of attention, or a whole model. Its first input, plain or distributed, is sharded along ``sequence_dim``; a plain
    one is taken for this rank's shard already. Parameters are left alone: replicate them. ``use_local_output``: whether to return the local
    tensor of the output rather than a distributed one.
    """

    def __init__(
        self,
        method: Method = "ring",
        *,
        zigzag: bool = False,
        sequence_dim: int = 1,
        use_local_output: bool = False,
    ) -> None:
        _C.ContextParallelScope(method, zigzag)  # refuses a bad method now
        self.method: Method = method
        self.zigzag = zigzag
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = Shard(self.sequence_dim)
        entered = threading.local()  # ranks may be threads

        def before(
            each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            scope = _C.ContextParallelScope(self.method, self.zigzag)
            scope.enter()
            entered.__dict__.setdefault("scopes", []).append(scope)
            what = f"the input of ContextParallel on {type(each).__name__}"
            if args:
                args = (_prepare(args[0], device_mesh, layout, layout, what), *args[1:])
            elif kwargs:
                first = next(iter(kwargs))
                kwargs = {**kwargs, first: _prepare(kwargs[first], device_mesh, layout, layout, what)}
            return args, kwargs

        def after(each: nn.Module, args: Any, outputs: Any) -> Any:
            scopes = entered.__dict__.get("scopes")
            if scopes:  # none if a hook before ours has failed
                scopes.pop().exit()
            if self.use_local_output and _C.is_dtensor(outputs):
                return _C.to_local(outputs, None)
            return outputs

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
        return module
