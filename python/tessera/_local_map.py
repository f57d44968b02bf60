"""Functions on local tensors as functions on distributed ones."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tessera import _C
from tessera._api import DTensor, Placements

OptionalPlacements = Placements | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: OptionalPlacements | tuple[OptionalPlacements, ...] = None,
    in_placements: Sequence[OptionalPlacements] | None = None,
    in_grad_placements: Sequence[OptionalPlacements] | None = None,
    device_mesh: _C.DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """``func``, written for what one rank holds, as a function of distributed tensors. Also a decorator.

    Each distributed argument is replaced by what this rank holds; each tensor in the result becomes a distributed one again, placed as
    ``out_placements`` says: placements if ``func`` returns one value, a tuple of them for several, with None for what is no tensor.
    Without a distributed argument ``func`` is called as it is.

    ``in_placements``: how each (flattened) argument must be placed, None for what is no tensor, or only how each tensor among them must be;
    another placement is an error, or redistributed with ``redistribute_inputs``. ``in_grad_placements``: how the gradients of the local tensors are placed.
    ``device_mesh``: of the results; by default that of the first distributed argument.

        @local_map(out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]))
        def product(x, y):
            return x @ y
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    name = getattr(func, "__name__", repr(func))

    def check_length(given: Sequence[Any], count: int, what: str) -> None:
        if len(given) != count:
            raise ValueError(
                f"local_map({name}): {what} has {len(given)} entries, but there are {count} values."
            )

    def for_each(given: Sequence[OptionalPlacements] | None, flat: list[Any], what: str) -> list[Any]:
        """One entry for each argument."""
        if given is None:
            return [None] * len(flat)
        is_tensor = [isinstance(argument, torch.Tensor) for argument in flat]
        if len(given) != len(flat) and len(given) == sum(is_tensor):
            entries = iter(given)
            return [next(entries) if is_one else None for is_one in is_tensor]
        check_length(given, len(flat), what)
        return list(given)

    def to_local(index: int, argument: Any, wanted: OptionalPlacements, grad: OptionalPlacements) -> Any:
        if not _C.is_dtensor(argument):
            if wanted is not None and not isinstance(argument, torch.Tensor):
                raise ValueError(
                    f"local_map({name}): argument {index} is no tensor, but in_placements has {wanted} for it, not None."
                )
            return argument
        if in_placements is not None:
            if wanted is None:
                raise AssertionError(
                    f"local_map({name}): argument {index} is distributed, so that local_map expects placements for it, but in_placements has "
                    "None."
                )
            if argument.placements != tuple(wanted):
                if not redistribute_inputs:
                    raise ValueError(
                        f"local_map({name}): argument {index} is placed {argument.placements}, but in_placements says {tuple(wanted)}. "
                        "Redistribute it, or set redistribute_inputs=True."
                    )
                argument = argument.redistribute(placements=wanted)
        return argument.to_local(grad_placements=grad)

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        flat, structure = pytree.tree_flatten(args)
        distributed = [argument for argument in flat if _C.is_dtensor(argument)]
        if not distributed:
            return func(*args, **kwargs)
        wanted = for_each(in_placements, flat, "in_placements")
        grads = for_each(in_grad_placements, flat, "in_grad_placements")
        mesh = distributed[0].device_mesh if device_mesh is None else device_mesh
        local = [to_local(index, *each) for index, each in enumerate(zip(flat, wanted, grads))]
        results, result_structure = pytree.tree_flatten(
            func(*pytree.tree_unflatten(local, structure), **kwargs)
        )
        targets = (
            out_placements
            if isinstance(out_placements, tuple) and _is_nested(out_placements)
            else (out_placements,)
        )
        check_length(targets, len(results), "out_placements")
        return pytree.tree_unflatten(
            [from_local(result, target, mesh) for result, target in zip(results, targets)], result_structure
        )

    def from_local(result: Any, target: Any, mesh: _C.DeviceMesh) -> Any:
        if not isinstance(result, torch.Tensor):
            if target is not None:
                raise ValueError(
                    f"local_map({name}): a result is no tensor, but out_placements has {target} for it, not None."
                )
            return result
        if target is None:
            return result
        if _C.is_dtensor(result):
            raise ValueError(
                f"local_map({name}): the function returned a tensor that is distributed already."
            )
        return DTensor.from_local(result, mesh, target)

    return wrapped


def _is_nested(placements: tuple[Any, ...]) -> bool:
    """Whether it is a tuple of placements for several results, not the placements of one."""
    return not any(isinstance(entry, _C.Placement) for entry in placements)
