"""Tables of operators that are implemented in Python."""

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

from torch.utils import _pytree as pytree

from tessera import _C

#: ``(types, args, kwargs, process_group)``, as ``__torch_function__`` has them.
Implementation = Callable[[Any, Any, Any, Any], Any]
Table = dict[Callable[..., Any], Implementation]


def _register_op(op: Callable[..., Any], func: Implementation, op_table: Table) -> None:
    if len(signature(func).parameters) != 4:
        raise TypeError(
            "A custom sharded op expects signature (types, args, kwargs, process_group), but this one has "
            f"{signature(func)}."
        )
    op_table[op] = func


def _decorator_func(wrapped_func: Implementation, op: Callable[..., Any], op_table: Table) -> Implementation:
    """Register an implementation of ``op``, which is called with sharded tensors of one group only."""

    @functools.wraps(wrapped_func)
    def wrapper(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        _check_arguments(op, args, kwargs)
        return wrapped_func(types, args, kwargs, process_group)

    _register_op(op, wrapper, op_table)
    return wrapper


def _check_arguments(op: Callable[..., Any], args: Any, kwargs: Any) -> None:
    sharded = [each for each in pytree.tree_leaves((args, kwargs)) if _C.is_sharded_tensor(each)]
    name = getattr(op, "__name__", str(op))
    if not sharded:
        raise TypeError(f"{name}: expected a sharded tensor among the arguments, but there is none.")
    ranks = [_C.sharded_ranks(each) for each in sharded]
    if any(each != ranks[0] for each in ranks):
        raise RuntimeError(f"{name}: its sharded tensors are shared by different ranks: {ranks}.")
