"""Distributed tensors inside the wrappers of torch.func, as grad, vjp and jvp make them.

Operators see through the wrappers by themselves. What changes between placements is no operator, and the functions of C++ that
differentiate it refuse to run inside of a transform: these of Python do not.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_current_level,
)
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from tessera import _C
from tessera._C import DeviceMesh, Placement, Replicate

Placements = Sequence[Placement]


def is_transformed() -> bool:
    """Whether tensors may have tangents, or be inside of wrappers."""
    return maybe_current_level() is not None or forward_ad._current_level >= 0


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """What the wrappers are around."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            raise NotImplementedError(
                "torch.func.vmap hides a dim of the tensor, so that its placements and local tensor mean something else. "
                "Redistribute outside of vmap (and of jacfwd, jacrev and hessian, which use it)."
            )
        tensor = get_unwrapped(tensor)
    return tensor


def wraps_dtensor(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or not is_functorch_wrapped_tensor(tensor):
        return False
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return _C.is_dtensor(tensor)


def _without_partials(placements: Placements) -> list[Placement]:
    return [Replicate() if placement.is_partial() else placement for placement in placements]


def _check_linear(what: str, placements: Placements) -> None:
    for placement in placements:
        if placement.is_partial() and placement.reduce_op not in ("sum", "avg"):  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{what}: {placement} has no derivative of forward-mode AD, as it is not linear. Redistribute to Replicate or Shard "
                "before the tensor gets a tangent."
            )


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(tensor: torch.Tensor, placements: Placements, *options: Any) -> torch.Tensor:
        return _C.redistribute(tensor, placements, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensor, ctx.target, ctx.is_async, ctx.forward_dtype, ctx.backward_dtype = inputs
        ctx.source, ctx.dtype = _C.placements(inside(tensor)), tensor.dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        options = (ctx.is_async, ctx.backward_dtype, ctx.forward_dtype)
        placed = redistribute(gradient, _without_partials(ctx.source), *options)
        return placed.to(ctx.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *options: Any) -> torch.Tensor:
        for placements in (ctx.source, ctx.target):
            _check_linear("redistribute", placements)
        return redistribute(tangent, ctx.target, ctx.is_async, ctx.forward_dtype, ctx.backward_dtype)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(tensor: torch.Tensor, grad_placements: Placements | None) -> torch.Tensor:
        return _C.to_local(tensor, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensor = inside(inputs[0])
        ctx.mesh, ctx.source = _C.device_mesh(tensor), _C.placements(tensor)
        ctx.grad_placements = inputs[1] or _without_partials(ctx.source)
        ctx.shape = tensor.shape

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return from_local(gradient, ctx.mesh, ctx.grad_placements, False, ctx.shape, None, None), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *options: Any) -> torch.Tensor:
        _check_linear("to_local", ctx.source)
        return to_local(redistribute(tangent, ctx.source, False, None, None), None)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(local: torch.Tensor, *options: Any) -> torch.Tensor:
        return _C.from_local(local, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *ctx.options = inputs
        ctx.placements = ctx.options[5] or _without_partials(_C.placements(inside(output)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        placed = redistribute(gradient, ctx.placements, False, None, None)
        return to_local(placed, None), *[None] * len(ctx.options)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *options: Any) -> torch.Tensor:
        return from_local(tangent, *ctx.options)


def redistribute(tensor: torch.Tensor, placements: Placements, *options: Any) -> torch.Tensor:
    """As `_C.redistribute`, of a distributed tensor or of a wrapper around one."""
    if maybe_current_level() is None:
        return _C.redistribute(tensor, placements, *options)
    if _C.is_placed(inside(tensor), placements) and options[1] in (None, tensor.dtype):
        return tensor
    return _Redistribute.apply(tensor, tuple(placements), *options)  # type: ignore[no-any-return,no-untyped-call]


def to_local(tensor: torch.Tensor, grad_placements: Placements | None) -> torch.Tensor:
    """As `_C.to_local`, likewise."""
    if maybe_current_level() is None:
        return _C.to_local(tensor, grad_placements)
    return _ToLocal.apply(tensor, grad_placements and tuple(grad_placements))  # type: ignore[no-any-return,no-untyped-call]


def full_tensor(tensor: torch.Tensor, grad_placements: Placements | None) -> torch.Tensor:
    """As `_C.full_tensor`, likewise."""
    if maybe_current_level() is None:
        return _C.full_tensor(tensor, grad_placements)
    everywhere = [Replicate()] * _C.device_mesh(inside(tensor)).ndim
    return to_local(redistribute(tensor, everywhere, False, None, None), grad_placements)


def from_local(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, *options: Any) -> torch.Tensor:
    """As `_C.from_local`, of a plain tensor or of a wrapper around one."""
    if maybe_current_level() is None:
        return _C.from_local(local, mesh, placements, *options)
    inside(local)
    return _FromLocal.apply(local, mesh, tuple(placements), *options)  # type: ignore[no-any-return,no-untyped-call]


def install() -> None:
    """Lets `torch.func.linearize`, which traces plain tensors, take distributed ones."""
    original = torch.func.linearize

    @functools.wraps(original)
    def linearize(func: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
        if not any(isinstance(leaf, torch.Tensor) and _C.is_dtensor(leaf) for leaf in tree_leaves(primals)):
            return original(func, *primals)
        return func(*primals), lambda *tangents: torch.func.jvp(func, primals, tangents)[1]

    torch.func.linearize = linearize
