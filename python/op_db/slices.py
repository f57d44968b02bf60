"""Which kernels of libtorch misread memory that has gaps? Those whose rules take slices must not.

Records the operators that PyTorch's operator database reaches below autograd, forward and backward, in several dtypes, and calls each again
with one tensor after the other in memory with gaps along each dim, between NaNs (of integers: ones, which are indices too).

    python slices.py                     all; fails if an operator whose rule takes slices misreads
    python slices.py --op 'nn.*' --op mm
"""

import argparse
import collections
import fnmatch
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import cases
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import _C

Call = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]

#: Calls of one operator that are tried for each entry of the database and dtype.
CALLS = 6

#: What libtorch has kernels of their own for. None: what the database is tried with otherwise.
DTYPES = (None, torch.bfloat16, torch.float64)


class Recorder(TorchDispatchMode):
    """Keeps copies of the calls that draw no numbers and return no views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._count: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_view = any(each.alias_info and not each.alias_info.is_write for each in op._schema.returns)
        if not is_view and torch.Tag.nondeterministic_seeded not in op.tags and self._count[op] < CALLS:
            self._count[op] += 1
            copied = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            self.calls.append((op, *copied))
        return op(*args, **kwargs)


def calls_of(name: str, dtypes: tuple[torch.dtype | None, ...]) -> list[Call]:
    """What one entry of the database calls."""
    return [call for dtype in dtypes for call in calls_in_dtype(name, dtype)]


def calls_in_dtype(name: str, dtype: torch.dtype | None) -> list[Call]:
    info = cases.OPS[name]
    cases.only_dtype = dtype
    try:
        samples = cases.samples_of(info, 8)
    finally:
        cases.only_dtype = None
    with Recorder() as recorder:
        for _, sample in samples:
            try:
                inputs = cases.Inputs(sample)
                result = inputs.call(info.op, inputs.fresh(grad=True))
                outputs = [
                    leaf
                    for leaf in pytree.tree_leaves(result)
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad
                ]
                if outputs:
                    torch.autograd.backward(outputs, [torch.randn_like(leaf) for leaf in outputs])
            except Exception:  # not of this dtype, or no gradient: what was called before counts
                continue
    return recorder.calls


def with_gaps(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values as a slice along each dim of something larger."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return
    for dim in range(tensor.ndim):
        shape = list(tensor.shape)
        shape[dim] += 3
        filled = torch.full(
            shape, torch.nan if tensor.is_floating_point() or tensor.is_complex() else 1, dtype=tensor.dtype
        )
        yield filled.narrow(dim, 1, tensor.shape[dim]).copy_(tensor)


def results(call: Call, gapped: torch.Tensor | None = None) -> list[Any]:
    """What it returns and, if it writes into arguments, these after it. All but `gapped` are copied before."""
    op, args, kwargs = call
    if op._schema.is_mutable:
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda each: each if each is gapped else each.clone(), (args, kwargs)
        )
    returned = pytree.tree_leaves(op(*args, **kwargs))
    return returned + (pytree.tree_leaves((args, kwargs)) if op._schema.is_mutable else [])


def agree(got: list[Any], expected: list[Any]) -> bool:
    for a, b in zip(got, expected, strict=True):
        if not isinstance(b, torch.Tensor) or b.layout is not torch.strided:
            continue
        rtol, atol = (2e-2, 2e-2) if b.dtype in (torch.bfloat16, torch.float16) else (1e-3, 1e-4)
        if a.shape != b.shape or not torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            return False
    return True


def misreads(call: Call) -> str | None:
    """The argument that is misread, if any. An error is none."""
    op, args, kwargs = call
    try:
        expected = results(call)
        if not agree(results(call), expected):  # what it leaves unwritten, say
            return None
    except Exception:
        return None
    leaves, structure = pytree.tree_flatten((args, kwargs))
    for index, leaf in enumerate(leaves):
        for gapped in with_gaps(leaf) if isinstance(leaf, torch.Tensor) else ():
            changed = [gapped if i == index else other for i, other in enumerate(leaves)]
            try:
                if not agree(results((op, *pytree.tree_unflatten(changed, structure)), gapped), expected):
                    return f"{leaf.dtype}{list(leaf.shape)} of {[tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)]}"
            except Exception:
                continue
    return None


def takes_slices(op: torch._ops.OpOverload) -> bool:
    return _C.takes_slices(op._schema.name, op._schema.overload_name)


def all_that_take_slices() -> set[str]:
    """Those that write into tensors that are given for it, which slices never are, apart."""
    names = (name.partition(".") for name in torch._C._dispatch_get_all_op_names())
    return {
        f"{name.replace('::', '.')}.{overload or 'default'}"
        for name, _, overload in names
        if name.startswith("aten::") and _C.takes_slices(name, overload) and "out" not in overload
    }


def try_all(
    names: list[str], dtypes: tuple[torch.dtype | None, ...] = DTYPES
) -> tuple[int, set[str], dict[str, str]]:
    """(calls, operators that take slices, what misreads and where) of these entries of the database."""
    tried, taking, found = 0, set(), {}
    for done, name in enumerate(names):
        if sys.stderr.isatty():
            print(f"\r{done}/{len(names)} {name:60}", end="", file=sys.stderr)
        for call in calls_of(name, dtypes):
            tried += 1
            op = call[0]
            if takes_slices(op):
                taking.add(str(op))
            if str(op) not in found and (where := misreads(call)):
                found[str(op)] = where
    return tried, taking, found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--op", action="append", default=[], help="a pattern of names in the database; all without"
    )
    parser.add_argument("--one-dtype", action="store_true", help="not in several dtypes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = [
        name
        for name in cases.OPS
        if not options.op or any(fnmatch.fnmatch(name, pattern) for pattern in options.op)
    ]
    tried, taking, found = try_all(names, DTYPES[:1] if options.one_dtype else DTYPES)
    print(f"{tried} calls; {len(taking)} operators take slices; {len(found)} misread memory with gaps:")
    wrong = sorted(op for op in found if op in taking)
    for op, where in sorted(found.items()):
        print(f"  {op}: {where}{'  <- but its rule takes slices' if op in wrong else ''}")
    if not options.op:
        missed = sorted(all_that_take_slices() - taking)
        print(
            f"{len(missed)} operators take slices, but the database does not reach them: {', '.join(missed)}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
