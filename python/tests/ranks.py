"""Tests that run on ranks: threads of this process."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tessera
from tessera import Partial, Replicate, Shard


def on_ranks(world_size: int = 4) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs on that many ranks, and passes if it does on all of them."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            tessera.run(world_size, functools.partial(test, *args, **kwargs), timeout=60)

        return wrapper

    return decorate


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def meshes() -> list[tessera.DeviceMesh]:
    """Over 4 ranks."""
    return [
        tessera.init_device_mesh("cpu", (4,)),
        tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    ]


def placements_of(
    tensor: torch.Tensor, mesh: tessera.DeviceMesh, partial: bool = True
) -> Iterator[tuple[tessera.Placement, ...]]:
    """All placements of a tensor on a mesh."""
    choices: list[tessera.Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]
    if partial:
        choices.append(Partial())
    yield from itertools.product(choices, repeat=mesh.ndim)


def assert_full(distributed: Any, expected: torch.Tensor, **tolerance: float) -> None:
    """It is a distributed tensor of that value."""
    assert isinstance(distributed, tessera.DTensor)
    torch.testing.assert_close(distributed.full_tensor(), expected, **tolerance)


class Collectives:
    """Counts the collectives of this rank along the dims of a mesh, one by one: ``with Collectives(mesh) as count: ...; assert count == 1``."""

    def __init__(self, mesh: tessera.DeviceMesh) -> None:
        self._backends = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]

    def _total(self) -> int:
        return sum(backend._get_sequence_number_for_group() for backend in self._backends)

    def __enter__(self) -> "Collectives":
        self._before = self._total()
        self._after: int | None = None
        return self

    def __exit__(self, *exception: object) -> None:
        self._after = self._total()

    def __eq__(self, other: object) -> bool:
        return self._after is not None and self._after - self._before == other

    def __repr__(self) -> str:
        return "collectives under way" if self._after is None else f"{self._after - self._before} collectives"
