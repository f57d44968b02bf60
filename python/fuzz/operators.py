"""Operators of PyTorch's database: any dtype, all ways of calling, all modes, memory of all kinds."""

import fnmatch
import random
from typing import Any

import cases
import exceptions
import torch
from cases import Inputs
from harness import Out, Place, differentiate
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tessera import DTensor

USES = [cases]
MODES = ("gradients", "gradients", "gradients", "no_grad", "inference_mode", "autocast")
MEMORY = (
    "transposed",
    "strided",
    "expanded",
    "flipped",
    "negated",
    "locally transposed",
    "locally strided",
    "locally negated",
)
COMPLEX_MEMORY = (*MEMORY, "conjugated", "locally conjugated")

#: Memory with which one device is no measure of an operator.
UNFIT = {
    # Of columns or rows that are all the same results are noise; masked_fill_ writes into them, and warns.
    "expanded": (
        *("linalg.*", "svd*", "pca_lowrank", "eig*", "lu*", "cholesky*", "ormqr", "geqrf", "qr", "pinverse"),
        *("logdet", "det", "slogdet", "masked_fill"),
        "native_group_norm",  # reads weights as if they were contiguous
    ),
}

#: With out=, they read their first input as if it were contiguous.
MISREAD_WITH_OUT = ("native_batch_norm",)

#: One device loses what is written into running statistics that are negated lazily. Weights are of one dim too.
WRITE_STATISTICS = ("*batch_norm*",)

#: Operators that, on one device, write into `out` as if it were contiguous.
MISWRITE = ("nn.functional.avg_pool3d", "nn.functional.gelu")

#: Operators that read memory as it lies.
OF_MEMORY = ("as_strided*",)

#: Complex numbers of float16 can be neither summed nor reduced.
LEFT_OUT = (torch.complex32,)

NAMES = [
    name
    for name, op in cases.OPS.items()
    if name not in exceptions.LEFT_OUT and op.name not in cases.UNINITIALISED and op.supported_dtypes("cpu")
]


def draw(
    name: str, rng: random.Random, modes: tuple[str, ...] = MODES
) -> tuple[dict[str, Any], str, tuple[float, float]]:
    """(options, mode, tolerance)"""
    op = cases.OPS[name]
    supported = sorted(op.supported_dtypes("cpu") - set(LEFT_OUT), key=str)
    preferred = [
        dtype
        for dtype in (torch.float64, torch.float64, torch.complex128, torch.float32)
        if dtype in supported
    ]
    dtype = rng.choice([*preferred * 2, *supported])
    ways = [
        "function",
        "function",
        *(["in-place"] if op.inplace_variant else []),
        *(["out"] if op.supports_out else []),
    ]
    way = rng.choice(ways)
    if (name, way) in exceptions.MAY_REFUSE:
        way = "function"
    mode = rng.choice(modes)
    if mode == "autocast" and dtype is torch.float16:
        mode = "no_grad"  # to bfloat16, libtorch itself refuses to join them, as ranks have to
    options = {
        "name": name,
        "number": rng.randrange(1000),
        "dtype": dtype,
        "way": way,
        "seed": rng.randrange(1000),
    }
    return options, mode, tolerance_of(op, dtype, mode)


def tolerance_of(op: Any, dtype: torch.dtype, mode: str) -> tuple[float, float]:
    if mode == "autocast":
        return (0.1, 0.1)
    if dtype in (torch.float64, torch.complex128):
        return (1e-6, 1e-7)
    rtol, atol = cases.tolerance_of(op, dtype)
    return (rtol * 10, atol * 10)


def memory_of(options: dict[str, Any], given: str, tensor: torch.Tensor, rng: random.Random) -> str:
    """`given`: as what the tensor is."""
    if not tensor.dim() or not tensor.numel() or rng.random() < 0.4:
        return ""
    found = rng.choice(COMPLEX_MEMORY if tensor.is_complex() else MEMORY)
    if given.startswith("out ") and (found == "expanded" or options["name"] in MISWRITE):
        return ""  # some operators write into expanded memory, and most refuse to

    def is_one_of(*names: str) -> bool:
        return any(fnmatch.fnmatch(options["name"], each) for each in names)

    if is_one_of(*OF_MEMORY, *UNFIT.get(found, ())):
        return ""
    if (
        found.endswith(("strided", "transposed"))
        and (given, options["way"]) == ("input 0", "out")
        and is_one_of(*MISREAD_WITH_OUT)
    ):
        return ""
    if found.endswith("negated") and tensor.dim() == 1 and is_one_of(*WRITE_STATISTICS):
        return ""
    return "" if "negated" in found and not (tensor.is_floating_point() or tensor.is_complex()) else found


def make(name: str, number: int, dtype: torch.dtype, way: str, seed: int) -> Any:
    op = next(op for op in op_db if f"{op.name}.{op.variant_test_name}".rstrip(".") == name)
    torch.manual_seed(seed)
    random.seed(seed)
    samples = list(
        op.sample_inputs(
            "cpu", dtype, requires_grad=op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        )
    )
    if not samples:
        return None
    sample = samples[number % len(samples)]
    return op, Inputs(sample), sample.output_process_fn_grad, way


def compute(made: Any, place: Place, out: Out) -> None:
    if made is None:
        return
    op, inputs, process, way = made
    tensors = list(inputs.tensors)
    if not tensors:
        return
    placed = {}
    for number, (tensor, wanted) in enumerate(zip(tensors, inputs.requires_grad)):
        if tensor.layout == torch.strided and tensor.device.type == "cpu":
            # Of an alias, as ranks share the tensor.
            tensors[number] = placed[f"input {number}"] = place(
                f"input {number}", tensor.detach().requires_grad_(wanted)
            )
    if way == "in-place":
        result = inputs.call(
            op.inplace_variant,
            tensors,
            lambda first: first.clone() if torch.is_grad_enabled() and first.requires_grad else first,
        )
    else:
        result = inputs.call(op.op, tensors)
    leaves = pytree.tree_leaves(result)
    for number, leaf in enumerate(leaves):
        out(f"result {number}", leaf)
    if (
        way == "out"
        and leaves
        and all(isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided for leaf in leaves)
    ):
        given = [
            place(f"out {number}", torch.zeros(leaf.shape, dtype=leaf.dtype))
            for number, leaf in enumerate(leaves)
        ]
        with torch.no_grad():
            inputs.call(op.op, tensors, out=given[0] if len(given) == 1 else tuple(given))
        for number, leaf in enumerate(given):
            out(f"out {number}", leaf, not isinstance(leaf, DTensor))
    for name, tensor in placed.items():
        out(f"{name} afterwards", tensor, not isinstance(tensor, DTensor))
    differentiate(process(result), placed, 2, place, out)
