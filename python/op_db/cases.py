"""What is tried: the operators of PyTorch's database, their samples, and how the tensors of a sample are placed.

A case is (operator, sample, mesh, layout); its number says all three of the latter and stays the same whatever options a run has.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Before the database, which keeps functions of torch that importing it changes.
from tessera import Partial, Placement, Replicate, Shard  # isort: skip

import torch
from oracle import SUMMABLE, copy_of, same_values
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo, SampleInput
from torch.utils import _pytree as pytree

MESHES = ((4,), (2, 2))

#: Numbers of the layouts of a sample: all replicated; 1 + d: dim d sharded; all partial sums; the rest: random mixes, the later ones
#: of them also of other reductions than sums.
REPLICATED, PARTIAL, FIRST_MIX, FIRST_REDUCED, LAYOUTS = 0, 7, 8, 10, 16

#: What they return was never written, so there are no values to compare.
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}

# The database seeds the generator of this process before each call of a random operator, which ranks that are threads share. They
# are tried without it.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

#: In float32 even one device is far from right, so that there is nothing to compare with.
ILL_CONDITIONED = {"logcumsumexp"}

#: Of all samples, if it is set.
only_dtype: torch.dtype | None = None

Layout = tuple[tuple[Placement, ...], ...]  # of each tensor, for each mesh dim


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS = {name_of(op): op for op in op_db}


def dtype_of(op: OpInfo) -> torch.dtype | None:
    """`only_dtype` if it is set; else float32, or the first that the operator supports. None if it does not on the CPU."""
    supported = op.supported_dtypes("cpu")
    if only_dtype is not None:
        return only_dtype if only_dtype in supported else None
    if name_of(op) in ILL_CONDITIONED:
        return torch.float64
    preferred = (torch.float32, torch.complex64, torch.int64, torch.bool)
    return next(
        (dtype for dtype in preferred if dtype in supported), next(iter(sorted(supported, key=str)), None)
    )


def tolerance_of(op: OpInfo, dtype: torch.dtype) -> tuple[float, float]:
    """(rtol, atol): the widest that PyTorch's own tests allow the operator, and no narrower than sums in another order need."""
    rtol, atol = (1e-4, 1e-5) if dtype not in (torch.float16, torch.bfloat16) else (5e-2, 5e-2)
    for info in op.decorators:
        for decorator in info.decorators if isinstance(info, DecorateInfo) else [info]:
            if isinstance(decorator, toleranceOverride) and dtype in decorator.d:
                rtol, atol = max(rtol, decorator.d[dtype].rtol), max(atol, decorator.d[dtype].atol)
    return rtol, atol


def seed_all(*what: Any) -> None:
    seed = zlib.crc32(repr(what).encode())
    torch.manual_seed(seed)
    random.seed(seed)


class Inputs:
    """The tensors of a sample, and how to call an operator with others in their place."""

    def __init__(self, sample: SampleInput) -> None:
        self._leaves, self._structure = pytree.tree_flatten(
            (sample.input, tuple(sample.args), dict(sample.kwargs))
        )
        self.tensors: list[torch.Tensor] = []
        self.requires_grad: list[bool] = []
        self._place: dict[int, int] = {}  # of a leaf, in tensors: one tensor may be given twice
        for index, leaf in enumerate(self._leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            same = next((i for i, known in enumerate(self._place) if self._leaves[known] is leaf), None)
            self._place[index] = len(self.tensors) if same is None else list(self._place.values())[same]
            if same is None:
                self.tensors.append(leaf.detach())
                self.requires_grad.append(leaf.requires_grad)

    def __repr__(self) -> str:
        names = [
            f"input {self._place[index]}" if index in self._place else leaf
            for index, leaf in enumerate(self._leaves)
        ]
        first, args, kwargs = pytree.tree_unflatten(names, self._structure)
        return f"{first}, {args}, {kwargs}"

    def call(
        self,
        function: Callable[..., Any],
        tensors: list[torch.Tensor],
        change_first: Any = None,
        **extra: Any,
    ) -> Any:
        leaves = list(self._leaves)
        for index, place in self._place.items():
            leaves[index] = tensors[place]
        first, args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        if change_first is not None:
            first = change_first(first)
        return function(first, *args, **kwargs, **extra)

    def first_is_tensor(self) -> bool:
        return bool(self._leaves) and isinstance(self._leaves[0], torch.Tensor)

    def fresh(self, grad: bool) -> list[torch.Tensor]:
        return [
            copy_of(tensor).requires_grad_(grad and wanted)
            for tensor, wanted in zip(self.tensors, self.requires_grad)
        ]


@dataclass
class Reference:
    """What one way of calling an operator gives on one device."""

    way: str  # "function", "in-place" or "out"
    call: Callable[[list[torch.Tensor], list[torch.Tensor]], Any]  # (inputs, out) -> result
    leaves: list[Any]  # of the result, detached
    structure: Any
    written: dict[int, torch.Tensor]  # inputs that the call changed, and what they are then
    is_random: bool
    has_values: bool
    grad_of: list[int] = field(default_factory=list)  # inputs that have gradients
    through: list[int] = field(default_factory=list)  # leaves of the processed result that they come through
    cotangents: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    process: Callable[[Any], Any] = lambda result: result


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def differentiable_leaves(value: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def references(op: OpInfo, sample: SampleInput, inputs: Inputs, gradients: bool) -> Iterator[Reference]:
    """The ways of calling the operator that one device can do with this sample."""

    def plainly(tensors: list[torch.Tensor], out: list[torch.Tensor]) -> Any:
        return inputs.call(op.op, tensors)

    function = reference("function", op, sample, inputs, plainly, [], gradients)
    if function is None:
        return
    yield function
    in_place = op.inplace_variant
    if in_place is not None and inputs.first_is_tensor():

        def into_self(tensors: list[torch.Tensor], out: list[torch.Tensor]) -> Any:
            # A copy, as leaves cannot be written. Its own values are part of the result: they must be what was returned.
            kept: list[torch.Tensor] = []

            def copied(first: torch.Tensor) -> torch.Tensor:
                kept.append(first.clone())
                return kept[0]

            return inputs.call(in_place, tensors, copied), kept[0]

        found = reference(
            "in-place", op, sample, inputs, into_self, [], gradients and op.supports_inplace_autograd
        )
        if found is not None:
            yield found
    leaves = function.leaves
    if (
        op.supports_out
        and leaves
        and all(isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided for leaf in leaves)
    ):

        def into_out(tensors: list[torch.Tensor], out: list[torch.Tensor]) -> Any:
            with torch.no_grad():
                inputs.call(op.op, tensors, out=out[0] if len(out) == 1 else tuple(out))
            return list(out)

        found = reference("out", op, sample, inputs, into_out, leaves, False)
        # What one device writes is not always what it returns; then there is nothing to compare with.
        if found is not None and (
            found.is_random or not found.has_values or all(map(same_values, found.leaves, leaves))
        ):
            yield found


def reference(
    way: str,
    op: OpInfo,
    sample: SampleInput,
    inputs: Inputs,
    call: Any,
    out: list[torch.Tensor],
    gradients: bool,
) -> Reference | None:
    """None if one device cannot do it either."""
    torch.manual_seed(0)
    generator = torch.get_rng_state()
    tensors = inputs.fresh(grad=way != "out")
    try:
        result = call(tensors, [torch.empty_like(leaf) for leaf in out])
    except Exception:
        return None
    is_random = not torch.equal(generator, torch.get_rng_state())
    leaves, structure = pytree.tree_flatten(result)
    leaves = [detached(leaf) for leaf in leaves]
    has_values = op.name not in UNINITIALISED
    written = {
        index: after.detach()
        for index, (before, after) in enumerate(zip(inputs.tensors, tensors))
        if not same_values(before, after.detach())
    }
    found = Reference(way, call, leaves, structure, written, is_random, has_values)
    if not gradients:
        return found
    process = sample.output_process_fn_grad
    found.process = process if way == "function" else lambda pair: process(pair[0])
    wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    try:
        through = differentiable_leaves(found.process(result))
        if not wanted or not through:
            return found
        found.cotangents = [torch.randn_like(leaf) for leaf in through]
        found.gradients = list(
            torch.autograd.grad(through, [tensors[i] for i in wanted], found.cotangents, allow_unused=True)
        )
        found.grad_of = wanted
    except Exception:
        found.cotangents, found.gradients, found.grad_of = [], [], []
    return found


def samples_of(op: OpInfo, limit: int | None, only: int | None = None) -> list[tuple[int, SampleInput]]:
    """Samples, spread over all that there are, with their numbers: the same each time."""
    dtype = dtype_of(op)
    if dtype is None:
        return []
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    seed_all(name_of(op))
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    if only is not None:
        return [(only, samples[only])]
    if limit is None or len(samples) <= limit:
        return list(enumerate(samples))
    numbers = sorted({round(i * (len(samples) - 1) / (limit - 1)) if limit > 1 else 0 for i in range(limit)})
    return [(number, samples[number]) for number in numbers]


def layouts_of(
    op_name: str, sample: int, tensors: list[torch.Tensor], mesh: tuple[int, ...], mixes: int
) -> dict[int, Layout]:
    """By number. None is there twice."""
    dims = range(len(mesh))
    can_be_partial = [tensor.dtype in SUMMABLE for tensor in tensors]

    def sharded(tensor: torch.Tensor, dim: int) -> tuple[Placement, ...]:
        if tensor.dim() <= dim:
            return tuple(Replicate() for _ in dims)
        return tuple(Shard((dim + i) % tensor.dim()) for i in dims)

    def mixed(
        tensor: torch.Tensor, partial: bool, reduced: bool, generator: random.Random
    ) -> tuple[Placement, ...]:
        reductions = (
            ["sum", "avg", "product", *(["max", "min"] if tensor.is_floating_point() else [])]
            if reduced
            else ["sum"]
        )
        partials: list[Placement] = [Partial(generator.choice(reductions))] * (
            partial + (partial and reduced)
        )
        choices = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()) for _ in range(2)), *partials]
        return tuple(generator.choice(choices) for _ in dims)

    found: dict[int, Layout] = {REPLICATED: tuple(tuple(Replicate() for _ in dims) for _ in tensors)}
    for dim in range(min(PARTIAL - 1, max((tensor.dim() for tensor in tensors), default=0))):
        found[1 + dim] = tuple(sharded(tensor, dim) for tensor in tensors)
    found[PARTIAL] = tuple(
        tuple(Partial() if partial else Replicate() for _ in dims) for partial in can_be_partial
    )
    for mix in range(mixes):
        generator = random.Random(f"{op_name} {sample} {mesh} {mix}")
        reduced = FIRST_MIX + mix >= FIRST_REDUCED
        found[FIRST_MIX + mix] = tuple(
            mixed(tensor, partial, reduced, generator) for tensor, partial in zip(tensors, can_be_partial)
        )
    return {
        number: layout
        for number, layout in found.items()
        if layout not in itertools.islice(found.values(), list(found).index(number))
    }


def case_number(sample: int, mesh: int, layout: int) -> int:
    return (sample * len(MESHES) + mesh) * LAYOUTS + layout


def case_parts(number: int) -> tuple[int, int, int]:
    """(sample, mesh, layout)"""
    return number // LAYOUTS // len(MESHES), number // LAYOUTS % len(MESHES), number % LAYOUTS
