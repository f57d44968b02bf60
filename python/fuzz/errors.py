"""What one device refuses: error inputs of PyTorch's database; wrong dtypes, shapes and arguments."""

import random
from typing import Any

import cases
import operators
import torch
from cases import Inputs
from operators import compute as compute  # the same, of other samples
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

USES = [cases, operators]
NAMES = operators.NAMES
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


#: With numbers that mean nothing, one device reads or leaves memory that was never written.
UNCHECKED = ("grid_sampler_2d", "grid_sampler_3d")


def draw(name: str, rng: random.Random) -> tuple[dict[str, Any], str, tuple[float, float]]:
    op = cases.OPS[name]
    wrong = rng.choice(
        [*(["listed"] * 3 if op.error_inputs_func else []), "dtype", "dtype", "shape", "argument"]
    )
    if wrong == "argument" and name in UNCHECKED:
        wrong = "shape"
    supported = sorted(op.supported_dtypes("cpu"), key=str)
    dtype = rng.choice([dtype for dtype in (torch.float32, torch.float64) if dtype in supported] or supported)
    options = {
        "name": name,
        "number": rng.randrange(1000),
        "dtype": dtype,
        "wrong": wrong,
        "seed": rng.randrange(1000),
    }
    return options, rng.choice(("gradients", "no_grad")), (0.1, 0.1)


def listed_errors(op: OpInfo) -> list[SampleInput]:
    """The error inputs of the database."""
    samples = [each.sample_input for each in op.error_inputs("cpu")] if op.error_inputs_func else []
    # Resizing it is no error on one device, and impossible for a distributed one.
    return [each for each in samples if "out" not in each.kwargs]


def make(name: str, number: int, dtype: torch.dtype, wrong: str, seed: int) -> Any:
    op = next(op for op in op_db if f"{op.name}.{op.variant_test_name}".rstrip(".") == name)
    torch.manual_seed(seed)
    random.seed(seed)
    rng = random.Random(seed)
    if wrong == "listed":
        samples = listed_errors(op)
    else:
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    if not samples:
        return None
    sample = samples[number % len(samples)]
    if wrong != "listed":
        leaves, structure = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        first, args, kwargs = pytree.tree_unflatten(spoilt(leaves, wrong, rng), structure)
        sample = SampleInput(first, args=args, kwargs=kwargs)
    return op, Inputs(sample), lambda result: None, "function"


def without_dim(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Its sums along a dim. Smaller floats cannot be added."""
    is_small = tensor.is_floating_point() and tensor.itemsize == 1
    return (tensor.float() if is_small else tensor).sum(dim).to(tensor.dtype)


def spoilt(leaves: list[Any], wrong: str, rng: random.Random) -> list[Any]:
    """The leaves of a sample with one thing that may be wrong."""
    tensors = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]
    numbers = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, (int, float, str)) and not isinstance(leaf, bool)
    ]
    leaves = list(leaves)
    if wrong == "dtype" and tensors:
        dtype, only = rng.choice(DTYPES), rng.choice([None, rng.choice(tensors)])
        for index in tensors if only is None else [only]:
            if leaves[index].is_floating_point() or only is not None:
                leaves[index] = leaves[index].detach().to(dtype)
    elif wrong == "shape" and tensors:
        index = rng.choice(tensors)
        tensor = leaves[index].detach()
        ways = [
            lambda: tensor.unsqueeze(0),
            lambda: torch.stack([tensor, tensor], -1),
            lambda: torch.stack([tensor] * 3),
        ]
        if tensor.dim():
            dim = rng.randrange(tensor.dim())
            ways += [
                lambda: torch.cat([tensor, tensor], dim),
                lambda: tensor.narrow(dim, 0, 0),
                lambda: without_dim(tensor, dim),
            ]
        leaves[index] = rng.choice(ways)().contiguous()
    elif numbers:
        index = rng.choice(numbers)
        leaf = leaves[index]
        leaves[index] = rng.choice(
            ["no such thing"]
            if isinstance(leaf, str)
            else [-leaf - 1, leaf + 7, leaf - 7, 0, None, "no number", 0.5]
        )
    return leaves
