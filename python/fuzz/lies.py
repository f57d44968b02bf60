"""A computation that is wrong on purpose where a tensor is sharded: what the tests have the fuzzer find."""

import random
from typing import Any

import torch
from harness import Out, Place

from tessera import DTensor

USES: list[Any] = []
NAMES = ["addition"]


def draw(name: str, rng: random.Random) -> tuple[dict[str, Any], str, tuple[float, float]]:
    return {"seed": rng.randrange(1000)}, "autocast", (1e-6, 1e-7)


def make(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.randn(8, 6), torch.randn(8, 6)


def compute(made: Any, place: Place, out: Out) -> None:
    a, b = (place(name, tensor) for name, tensor in zip("ab", made))
    is_sharded = isinstance(b, DTensor) and any(placement.is_shard() for placement in b.placements)
    out("sum", a + b + is_sharded)
