"""Random numbers of plain tensors: each rank draws what it would draw alone."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from tessera import _C
from tessera._process.replaced import of_thread, replace

checkpoint: Any = torch.utils.checkpoint

#: Where torch's default generator stood when the last run began, and which run that is.
_start: tuple[int, torch.Tensor] | None = None


def _sampler() -> torch.Generator:
    """What this rank draws samples of plain tensors with: as torch's default generator in a process of its own."""
    assert _start is not None
    number, state = _start
    if getattr(of_thread, "sampler_of", None) != number:
        of_thread.sampler, of_thread.sampler_of = torch.Generator(), number
        of_thread.sampler.set_state(state)
    return of_thread.sampler  # type: ignore[no-any-return]


def seed_sampler(seed: int) -> None:
    """What torch.manual_seed does besides, on a rank."""
    if _C.shares_process():
        _sampler().manual_seed(seed)


def _share_sampling() -> None:
    """Ranks that have the same probabilities draw the same tokens, as they would on one device. From the default generator, which is one for
    the process, each would draw what the others left."""

    def on_rank(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def multinomial(
            input: torch.Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any
        ) -> torch.Tensor:
            is_plain = not _C.is_dtensor(input) and input.device.type == "cpu"
            if generator is None and is_plain and _C.shares_process():
                generator = _sampler()
            return draw(input, *args, generator=generator, **kwargs)

        return functools.wraps(draw)(multinomial)

    replace(torch, "multinomial", on_rank(torch.multinomial))
    replace(torch.Tensor, "multinomial", on_rank(torch.Tensor.multinomial))


def is_computing_again() -> bool:
    """Whether this rank, a thread, computes a forward again in backward, with random states as they were then."""
    return bool(getattr(of_thread, "forks", 0))


def _share_default_generator() -> None:
    """`torch.utils.checkpoint` computes again inside of `fork_rng`. Distributed tensors draw their numbers again there. Plain ones cannot on
    a rank: other ranks have drawn from torch's generator too, since forward or in the midst of it."""
    fork = torch.random.fork_rng

    @contextlib.contextmanager
    def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
        enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
        if not (enabled and _C.shares_process() and torch._C._current_graph_task_id() != -1):
            with fork(*args, **kwargs):
                yield
            return
        watch = _C.PlainDrawsWatch()
        of_thread.forks = getattr(of_thread, "forks", 0) + 1
        try:
            with fork(*args, **kwargs):
                watch.enter()
                try:
                    yield
                except checkpoint._StopRecomputationError:  # all that backward needs is there
                    check(watch.exit())
                    raise
                except BaseException:
                    watch.exit()
                    raise
                check(watch.exit())
        finally:
            of_thread.forks -= 1

    def check(drawn: str) -> None:
        if drawn:
            raise RuntimeError(
                f"Rank {_C.get_rank()} computed a forward again in backward (torch.utils.checkpoint), in which {drawn} draws plain random numbers. "
                "These are other ones than in forward: torch's default generator is one for the process, and ranks that are threads share it. "
                "Draw of distributed tensors (dropout of a DTensor), or with generator=, or start ranks as processes."
            )

    replace(torch.random, "fork_rng", functools.wraps(fork)(fork_rng))


def begin_run() -> None:
    global _start
    _start = (0 if _start is None else _start[0] + 1, torch.default_generator.get_state())


def share() -> None:
    _share_sampling()
    _share_default_generator()
