"""Random numbers that do not depend on how a tensor is placed.

Each is a function of the seed, the count of calls and the element's index in the global tensor: the same on every mesh and with
every placement. All ranks draw alike, so nothing is communicated; ``torch``'s own generators are neither used nor disturbed.

    tessera.manual_seed(0)
    x = tessera.randn(4, 6, device_mesh=mesh, placements=[Shard(0)])      # what tessera.random.randn(4, 6) is, without ranks
    y = torch.nn.functional.dropout(x)                                    # the same mask, whatever the mesh
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tessera import _C, _process
from tessera._C import DeviceMesh

__all__ = [
    "check_agreement",
    "generator",
    "get_rng_state",
    "is_rng_supported_mesh",
    "manual_seed",
    "rand",
    "randint",
    "randn",
    "randperm",
    "replay",
    "set_checks_agreement",
    "set_rng_state",
    "stream",
]


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> None:
    """Start this rank's random numbers again from ``seed``. All ranks that hold the same tensors must do so alike.

    With a ``device_mesh`` of some ranks only, these get numbers of their own: calls on that mesh, and on meshes of some of its ranks, no
    longer count among those of all ranks. On a rank that is not in the mesh it does nothing. ``torch.manual_seed`` does the same as
    ``manual_seed(seed)``, besides what it does for torch.
    """
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        from tessera._bridge import mesh_from_torch

        device_mesh = mesh_from_torch(device_mesh)
    _C.manual_seed(int(seed) % 2**64, device_mesh)


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """True: there are random numbers on every device."""
    return True


def get_rng_state() -> torch.Tensor:
    """Where this rank's random numbers stand: a few bytes, for checkpoints."""
    return torch.frombuffer(bytearray(_C.get_rng_state().encode()), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor) -> None:
    """Go on from where :func:`get_rng_state` was called."""
    _C.set_rng_state(bytes(new_state.tolist()).decode())


@contextlib.contextmanager
def replay(state: torch.Tensor) -> Iterator[None]:
    """Inside, this rank draws the numbers again that it drew after ``state`` was got; then it goes on from where it was."""
    before = _C.get_rng_state()
    set_rng_state(state)
    try:
        yield
    finally:
        _C.set_rng_state(before)


@contextlib.contextmanager
def stream(id: int) -> Iterator[None]:
    """Inside, random numbers of this thread come from a stream of their own, from its beginning: the same for the same seed and ``id``."""
    scope = _C.RandomStreamScope(int(id) % 2**64)
    scope.enter()
    try:
        yield
    finally:
        scope.exit()


def generator() -> torch.Generator:
    """This rank's own generator for functions of torch on plain tensors: different numbers on each rank, the same in each run.

    Ranks that are threads share torch's default generator, so what they draw from that depends on who comes first.

        torch.randn(3, generator=tessera.random.generator())
    """
    return _C.rank_generator()


def check_agreement(device_mesh: DeviceMesh) -> None:
    """An error on all ranks of the mesh, which names those that differ, unless they would draw the same numbers on it."""
    _C.check_random_agreement(device_mesh)


def set_checks_agreement(checks: bool) -> None:
    """Whether that is done before each random operator, on all ranks; also switched on by TESSERA_CHECK_RANDOM=1 in the environment."""
    _C.set_checks_random_agreement(checks)


def _size(size: tuple[Any, ...]) -> list[int]:
    return list(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else list(size)


def rand(*size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The plain tensor that ``tessera.rand`` distributes."""
    return _C.plain_rand(_size(size), dtype or torch.get_default_dtype())


def randn(*size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The plain tensor that ``tessera.randn`` distributes."""
    return _C.plain_randn(_size(size), dtype or torch.get_default_dtype())


def randint(low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Whole numbers in [low, high), as a plain tensor."""
    return _C.plain_randint(low, high, list(size), dtype)


def randperm(n: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A permutation of 0, ..., n - 1, as a plain tensor."""
    return _C.plain_randperm(n, dtype)


#: What torch.get_rng_state gave, and where ours stood then.
_states: Any = WeakIdKeyDictionary()


def install() -> None:
    """Let what saves and restores torch's state (torch.utils.checkpoint, torch.random.fork_rng) do so with ours, and torch.manual_seed seed
    ours."""
    get_state, set_state, seed_all = torch.get_rng_state, torch.set_rng_state, torch.random._manual_seed_impl

    @functools.wraps(get_state)
    def get_rng_state() -> torch.Tensor:
        state = get_state()
        _states[state] = _C.get_rng_state()
        return state

    @functools.wraps(set_state)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if not _process.is_computing_again():  # torch's generator is not this rank's alone
            set_state(new_state)
        ours = _states.get(new_state)
        if ours is not None:
            _C.set_rng_state(ours)

    @functools.wraps(seed_all)
    def _manual_seed_impl(seed: Any) -> Any:
        result = seed_all(seed)
        manual_seed(seed)
        _process.seed_sampler(int(seed))
        return result

    for module in (torch, torch.random):
        module.get_rng_state = get_rng_state  # type: ignore[attr-defined]
        module.set_rng_state = set_rng_state  # type: ignore[attr-defined]
    torch.random._manual_seed_impl = _manual_seed_impl
