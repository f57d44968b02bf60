"""All that PyTorch's database says one device refuses: every error input, and every dtype that an operator does not support."""

import random
from collections.abc import Iterator
from typing import Any

import cases
import errors
import operators
import torch
from cases import Inputs
from errors import DTYPES, listed_errors
from operators import compute as compute  # the same, of other samples
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

USES = [cases, operators, errors]


def names() -> Iterator[str]:
    """Operator, and the number of an error input or a dtype. Not at import, in the process that workers are forked from: the inputs are
    computed, on threads of torch that a fork does not have."""
    for name in operators.NAMES:
        op = cases.OPS[name]
        for number in range(len(listed_errors(op))):
            yield f"{name}:{number}"
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                yield f"{name}:{str(dtype).removeprefix('torch.')}"


def draw(name: str, rng: random.Random) -> tuple[dict[str, Any], str, tuple[float, float]]:
    op, _, what = name.rpartition(":")
    wrong = int(what) if what.isdigit() else getattr(torch, what)
    return {"name": op, "wrong": wrong}, rng.choice(("gradients", "no_grad")), (0.1, 0.1)


def make(name: str, wrong: int | torch.dtype) -> Any:
    """`wrong`: the number of an error input, or the dtype of all tensors that the operator supports in another one."""
    op = next(op for op in op_db if f"{op.name}.{op.variant_test_name}".rstrip(".") == name)
    torch.manual_seed(0)
    random.seed(0)
    if isinstance(wrong, int):
        sample = listed_errors(op)[wrong]
    else:
        supported = sorted(op.supported_dtypes("cpu"), key=str)
        dtype = next((each for each in (torch.float32, torch.int64) if each in supported), supported[0])
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        if not samples:
            return None
        first, args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.detach().to(wrong) if tensor.dtype == dtype else tensor,
            (samples[0].input, tuple(samples[0].args), dict(samples[0].kwargs)),
        )
        sample = SampleInput(first, args=args, kwargs=kwargs)
    return op, Inputs(sample), lambda result: None, "function"
