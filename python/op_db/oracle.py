"""What it takes to compare with one device: how tensors are placed, and what is the same."""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

import tessera
from tessera import DTensor, Partial, Placement, Replicate, Shard, _StridedShard

#: What can be a partial sum. Smaller floats cannot be added.
SUMMABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides where there can be one."""
    if tensor.layout != torch.strided:
        return tensor.clone()
    return (
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        if is_dense(tensor)
        else tensor.clone()
    )


def is_dense(tensor: torch.Tensor) -> bool:
    return torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)


def random_placements(
    rng: random.Random, ndim: int, mesh_ndim: int, reductions: list[str]
) -> list[Placement]:
    """Of a tensor of so many dims, which may be partial in these ways."""
    choices: list[Placement] = [Replicate()]
    for dim in range(ndim):
        choices += [Shard(dim), Shard(dim), _StridedShard(dim, split_factor=rng.choice([2, 3]))]
    if reductions:
        choices += [Partial(rng.choice(reductions))] * 2  # all partial values of one tensor are of one kind
    return [rng.choice(choices) for _ in range(mesh_ndim)]


def local_part(tensor: torch.Tensor, part: int, parts: int, reduction: str, seed: int) -> torch.Tensor:
    """What one of several holds of a value that is yet to be reduced: exactly `tensor`, whatever the order.

    Of a sum, one has twice the value at each place, and another its negative, so that no operator that takes them for whole
    values can be right by chance. Others likewise.
    """
    if parts == 1:
        return copy_of(tensor)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(parts, tensor.shape, generator=generator) - part
    second = (first + torch.randint(1, parts, tensor.shape, generator=generator)) % parts
    one, none = torch.ones_like(tensor), torch.zeros_like(tensor)
    values = {  # of the first, of the second, of the others
        "sum": (tensor * 2, -tensor, none),
        "avg": (tensor * 2, none, tensor),
        "product": (tensor * 2, one / 2, one),
        "max": (tensor, tensor - tensor.abs() - 1, tensor - 1),
        "min": (tensor, tensor + tensor.abs() + 1, tensor + 1),
    }[reduction]
    # Where twice the value is infinite, the first has it all.
    rest = {"sum": none, "avg": tensor, "product": one, "max": tensor, "min": tensor}[reduction]
    is_safe = tensor.abs() < torch.finfo(tensor.dtype).max / 16
    safe = torch.where(first == 0, values[0], torch.where(second == 0, values[1], values[2]))
    return copy_of(tensor).copy_(torch.where(is_safe, safe, torch.where(first == 0, tensor, rest)))


def place(
    tensor: torch.Tensor, mesh: tessera.DeviceMesh, placements: tuple[tessera.Placement, ...], seed: int
) -> torch.Tensor:
    """This rank's part of the tensor, as a distributed one with memory of its own."""
    index, count, reduction = 0, 1, "sum"
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            index = index * mesh.size(dim) + mesh.get_local_rank(dim)
            count *= mesh.size(dim)
            reduction = placement.reduce_op
    part = local_part(tensor, index, count, reduction, seed)
    reduced = [Replicate() if placement.is_partial() else placement for placement in placements]
    result = tessera.distribute_tensor(part, mesh, reduced, src_data_rank=None)
    if count == 1:
        return result
    return DTensor.from_local(result.to_local(), mesh, placements, shape=tensor.shape, stride=result.stride())


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[attr-defined]


def same_values(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
            return False
        if a.layout != torch.strided:
            return same_values(a.to_dense(), b.to_dense())
        if a.dtype == torch.complex32:  # cannot be compared
            return same_values(a.to(torch.complex64), b.to(torch.complex64))
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b) or (a != a and b != b)


class Wrong(Exception):
    """The operator gave something else than on one device."""


@dataclass
class Tolerance:
    rtol: float
    atol: float

    def wider(self) -> "Tolerance":
        return Tolerance(self.rtol * 10, self.atol * 10)


def compare(name: str, got: Any, expected: Any, tolerance: Tolerance, values: bool) -> None:
    if not isinstance(expected, torch.Tensor):
        if type(got) is not type(expected):
            raise Wrong(f"{name} is {type(got).__name__}, not {type(expected).__name__}")
        is_close = got == expected or (
            isinstance(got, float)
            and (math.isclose(got, expected, rel_tol=1e-4) or (got != got and expected != expected))
        )
        if values and not is_close:
            raise Wrong(f"{name} is {got}, not {expected}")
        return
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{name} is {type(got).__name__}, not a tensor")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise Wrong(f"{name} is {got.dtype}{list(got.shape)}, not {expected.dtype}{list(expected.shape)}")
    if not values or same_values(got, expected):
        return
    if expected.dtype == torch.complex32:
        got, expected = got.to(torch.complex64), expected.to(torch.complex64)
    elif expected.is_floating_point() and expected.itemsize == 1:  # whose maximum cannot be had
        got, expected = got.float(), expected.float()
    finite = (
        expected[torch.isfinite(expected)].abs()
        if expected.is_floating_point() or expected.is_complex()
        else expected.flatten()[:0]
    )
    scale = max(1.0, finite.max().item() if finite.numel() else 0.0)
    try:
        torch.testing.assert_close(
            got, expected, rtol=tolerance.rtol, atol=tolerance.atol * scale, equal_nan=True
        )
    except AssertionError as error:
        lines = [
            line
            for line in str(error).splitlines()
            if line and "not close" not in line and "not equal" not in line
        ]
        raise Wrong(f"{name}: {'; '.join(lines)}") from None


def is_of_peer(text: str) -> bool:
    return "cannot complete" in text


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
