"""Which ranks there are: threads of this process, or the processes of torch.distributed."""

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tessera import _C, _process

_Result = TypeVar("_Result")

#: The default group whose ranks the C++ library knows as the world of this process.
_adopted: Any = None

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(
    world_size: int,
    function: Callable[..., _Result],
    *args: Any,
    timeout: float = 600.0,
    backend: str = "",
    threads_per_rank: int = 0,
) -> list[_Result]:
    """Call ``function(*args)`` on ``world_size`` ranks, which are threads of this process; return what each returned.

    If a rank raises, the others stop waiting for it, and its exception is raised here. The caller's grad mode, inference mode
    and autocast hold on the ranks too. What is one for the process (the default dtype, say) is changed by all ranks together: docs/threads.md.

    ``timeout``: the longest that a rank waits for another, in seconds. ``backend``: what carries the tensors; "threads" by
    default. ``threads_per_rank``: threads that torch uses inside an operator on each rank; by default the cores divided among
    the ranks.

        >>> tessera.run(2, lambda: tessera.get_rank())
        [0, 1]
    """
    with _process.shared_by_ranks():
        return _C.run_ranks(world_size, function, args, timeout, backend, threads_per_rank)


def ensure_if_any() -> bool:
    """As :func:`ensure`, but where there are no ranks, this process is alone: then return False."""
    global _adopted
    if (
        _C.is_rank_thread()
        or (dist.is_available() and dist.is_initialized())
        or all(name in os.environ for name in _LAUNCHER_VARIABLES)
    ):
        ensure()
        return True
    if _adopted is not None:
        _C.forget_process_group()
        _adopted = None
    return False


def ensure() -> None:
    """See to it that the calling thread has a world: that of ``run``, else that of torch.distributed."""
    global _adopted
    if _C.is_rank_thread():
        return
    if not dist.is_available():
        raise RuntimeError(
            "This torch has no torch.distributed. Start ranks as threads, with tessera.run(n, function)."
        )
    if not dist.is_initialized():
        if not all(name in os.environ for name in _LAUNCHER_VARIABLES):
            raise RuntimeError(
                "There are no ranks here. Start them as threads, with tessera.run(n, function), or as processes: with torchrun, "
                "or by calling torch.distributed.init_process_group()."
            )
        dist.init_process_group()
    group = dist.group.WORLD
    if _adopted is group:
        return
    is_fake = dist.get_backend() == "fake"  # then the others are not there, and the store may be none either
    store = None if is_fake else dist.distributed_c10d._get_default_store()
    timeout = dist.distributed_c10d._get_default_timeout(dist.get_backend()).total_seconds()
    backend = "fake" if is_fake else _backend_of_cpu()
    _C.adopt_process_group(dist.get_rank(), dist.get_world_size(), store, timeout, backend)
    if _adopted is None:
        _tell_others_of_the_end()
    _adopted = group


def _backend_of_cpu() -> str:
    """What carries tensors of the CPU, as torch.distributed was told: for the groups that it cannot make."""
    backends = dist.get_backend_config().split(",")
    return "cpu:shm" if "cpu:shm" in backends else "cpu:gloo"


def _make_shm_backend(options: Any, _: Any) -> Any:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    timeout = options.timeout.total_seconds()
    name = f"shm/cpu/{options.group_id}"
    group = _C.make_shm_group(options.store, options.group_rank, ranks, timeout, name)
    return group._get_backend(torch.device("cpu"))


if dist.is_available():
    dist.Backend.register_backend("shm", _make_shm_backend, extended_api=True, devices=["cpu"])


def _tell_others_of_the_end() -> None:
    """See to it that the other ranks hear at once of an exception that ends this process, and of its end."""
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _C.report_failure(f"{kind.__name__}: {error}")
        previous(kind, error, trace)

    sys.excepthook = report
    atexit.register(_C.forget_process_group)


def group_of(ranks: list[int]) -> Any:
    """The group of torch.distributed of exactly these ranks, in this order, or None. Called by its members alone."""
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    if ranks != sorted(ranks):
        return None  # torch.distributed sorts them
    return dist.new_group(ranks, use_local_synchronization=dist.get_backend() != "fake")
