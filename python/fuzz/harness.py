"""One computation, on one device and on ranks: what it gives, or how it is refused, must be the same.

A computation is a function (made, place, out). It takes what was made for it, calls `place(name, tensor)` for
each tensor that is to be distributed, and `out(name, value)` with each value to compare.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from oracle import Tolerance, Wrong, compare, copy_of, first_line, full, is_of_peer, place
from tessera.experimental import implicit_replication
from torch.utils import _pytree as pytree

import tessera
from tessera import DTensor

Place = Callable[[str, torch.Tensor], torch.Tensor]
Out = Callable[..., None]  # (name, value, may_be_plain=False)
Compute = Callable[[Any, Place, Out], None]


def context(mode: str) -> Any:
    return {
        "gradients": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }[mode]()


def laid(
    tensor: torch.Tensor, memory: str, distribute: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The tensor, distributed, with memory in another order than its elements'."""

    def locally(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        found = distribute(tensor)
        if not isinstance(found, DTensor):
            return function(found)
        mesh, placements = found.device_mesh, found.placements
        local = function(found.to_local())
        return DTensor.from_local(local, mesh, placements, shape=found.shape, stride=found.stride())

    match memory:
        case "transposed":
            return distribute(tensor.transpose(0, -1).contiguous()).transpose(0, -1)
        case "strided":
            return distribute(torch.stack([tensor, tensor], -1)).select(-1, 0)
        case "expanded":
            return distribute(tensor[:1]).expand(tensor.shape)
        case "flipped":
            return distribute(tensor.flip(0)).flip(0)
        case "conjugated":
            return distribute(tensor.conj().resolve_conj()).conj()
        case "negated":
            return torch._neg_view(distribute(-tensor))
        case "locally transposed":
            return locally(lambda local: local.transpose(0, -1).contiguous().transpose(0, -1))
        case "locally strided":
            return locally(lambda local: torch.stack([local, local], -1).select(-1, 0))
        case "locally conjugated":
            return locally(lambda local: local.conj().resolve_conj().conj())
        case "locally negated":
            return locally(lambda local: torch._neg_view(-local))
    return distribute(tensor)


def recorded(compute: Compute, made: Any, mode: str, place: Place) -> list[tuple[str, Any]]:
    """What the computation gives, and what it raises in the end."""
    found: list[tuple[str, Any]] = []

    def out(name: str, value: Any, may_be_plain: bool = not tessera._C.is_rank_thread()) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        is_plain = is_tensor and not isinstance(value, DTensor) and not may_be_plain
        found.append((f"plain {name}" * is_plain or name, full(value).clone() if is_tensor else value))

    try:
        with context(mode):
            compute(made, torch.autocast("cpu", enabled=False)(place), out)
    except Exception as error:
        found.append(("error", error))
    return found


def is_refused(found: list[tuple[str, Any]]) -> bool:
    return bool(found) and found[-1][0] == "error"


def alone(
    compute: Compute, made: Any, mode: str, memory: dict[str, str], seen: dict[str, torch.Tensor]
) -> list[tuple[str, Any]]:
    """On one device. `seen`: the tensors that can be distributed."""

    def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
        seen[name] = tensor.detach()
        return laid(tensor.detach(), memory.get(name, ""), copy_of).requires_grad_(tensor.requires_grad)

    return recorded(compute, made, mode, keep)


def together(
    compute: Compute,
    made: Any,
    mode: str,
    memory: dict[str, str],
    mesh: tuple[int, ...],
    placements: dict[str, Any],
    timeout: float = 20,
) -> list[list[tuple[str, Any]]]:
    """On each rank. What has no placements stays as it is, and plain."""

    def on_a_rank() -> list[tuple[str, Any]]:
        device_mesh = tessera.init_device_mesh("cpu", mesh)

        def distribute(name: str, tensor: torch.Tensor) -> torch.Tensor:
            def placed(each: torch.Tensor) -> torch.Tensor:
                given = placements.get(name)
                return copy_of(each) if given is None else place(each, device_mesh, given, len(name))

            return laid(tensor.detach(), memory.get(name, ""), placed).requires_grad_(tensor.requires_grad)

        with implicit_replication():
            return recorded(compute, made, mode, distribute)

    return tessera.run(math.prod(mesh), on_a_rank, timeout=timeout, threads_per_rank=1)


def agree(
    got: list[list[tuple[str, Any]]],
    expected: list[tuple[str, Any]],
    tolerance: tuple[float, float],
    values: bool,
) -> None:
    """Raises Wrong if ranks gave something else than one device. `values`: not dtypes and shapes alone."""
    errors = {rank: found[-1][1] for rank, found in enumerate(got) if is_refused(found)}
    own = {rank: error for rank, error in errors.items() if not is_of_peer(str(error))}
    refused = expected[-1][1] if is_refused(expected) else None
    if errors and not own:
        raise Wrong(f"the ranks wait for each other: {first_line(next(iter(errors.values())))}")
    if own and len(own) < len(got):
        raise Wrong(f"ranks {sorted(own)} alone raise {described(next(iter(own.values())))}")
    if refused is not None and not own:
        raise Wrong(f"one device raises {described(refused)}, the ranks do not")
    if own and type(own[0]) is not type(refused):
        raise Wrong(
            f"the ranks raise {described(own[0])}, one device {'nothing' if refused is None else described(refused)}"
        ) from own[0]
    for found in got:
        if [name for name, _ in found] != [name for name, _ in expected]:
            raise Wrong(
                f"the ranks give {[name for name, _ in found]}, one device {[name for name, _ in expected]}"
            )
        for (name, one), (_, other) in zip(found, expected):
            if name != "error":
                compare(name, one, other, Tolerance(*tolerance), values)


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def differentiate(results: Any, inputs: dict[str, torch.Tensor], orders: int, place: Place, out: Out) -> None:
    """Gradients of the results by the inputs, then gradients of these, and so on."""
    wanted = {
        name: tensor for name, tensor in inputs.items() if tensor.requires_grad and torch.is_grad_enabled()
    }
    for order in ("gradient", "double gradient")[: orders if wanted else 0]:
        leaves = {
            n: leaf
            for n, leaf in enumerate(pytree.tree_leaves(results))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }
        total: Any = 0
        for number, leaf in leaves.items():
            weight = torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)
            product = (
                leaf
                * place(
                    f"weight {number} of the {order}", weight * (1 + 0.5j) if leaf.is_complex() else weight
                )
            ).sum()
            total = total + (product.real if leaf.is_complex() else product)
        none = [None] * len(wanted)
        results = (
            torch.autograd.grad(
                total, list(wanted.values()), create_graph=order != "double gradient", allow_unused=True
            )
            if leaves
            else none
        )
        # None is zero.
        results = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(wanted.values(), results)
        ]
        for (name, tensor), gradient in zip(wanted.items(), results):
            out(f"{order} of {name}", gradient, not isinstance(tensor, DTensor))


def check(
    compute: Compute,
    made: Any,
    *,
    mesh: tuple[int, ...],
    placements: dict[str, Any],
    mode: str,
    memory: dict[str, str],
    tolerance: tuple[float, float],
) -> None:
    """Raises Wrong if it is not right on ranks."""
    before = torch.get_rng_state()
    expected = alone(compute, made, mode, memory, {})
    values = torch.equal(before, torch.get_rng_state())  # random ones are not those of one device
    agree(together(compute, made, mode, memory, mesh, placements), expected, tolerance, values)
