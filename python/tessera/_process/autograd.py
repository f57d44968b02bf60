"""Anomaly mode, forward-mode AD, the profiler, and saved tensors that may be written."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch.autograd.forward_ad
import torch.autograd.graph
import torch.autograd.profiler

from tessera import _C
from tessera._process.replaced import AtEnd, mutex, of_thread, replace, undo

eager_transforms: Any = torch._functorch.eager_transforms
forward_ad: Any = torch.autograd.forward_ad
graph: Any = torch.autograd.graph
profiler: Any = torch.autograd.profiler

# --- Anomaly mode: on while one of the ranks has it on ------------------------------------------------------

#: (whether it is on, whether NaN is an error) on the ranks that have said so, which are still running.
_anomaly: dict[int, tuple[bool, bool]] = {}


def _share_anomaly_mode() -> None:
    change, is_on, checks = (
        torch.set_anomaly_enabled,
        torch.is_anomaly_enabled,
        torch.is_anomaly_check_nan_enabled,
    )
    before = (is_on(), checks())
    _anomaly.clear()

    def set_anomaly_enabled(enabled: bool, check_nan: bool = True) -> None:
        if not _C.shares_process():
            return change(enabled, check_nan)
        thread = threading.get_ident()
        with mutex:
            _anomaly[thread] = (enabled, check_nan)
            combine()
        if not hasattr(of_thread, "anomaly"):
            of_thread.anomaly = AtEnd(lambda: forget(thread))

    def combine() -> None:
        checks_nan = [check for on, check in [before, *_anomaly.values()] if on]
        change(*((True, any(checks_nan)) if checks_nan else before))

    def forget(thread: int) -> None:
        with mutex:
            if _anomaly.pop(thread, None) is not None:
                combine()

    def is_anomaly_enabled() -> bool:
        return _anomaly.get(threading.get_ident(), before)[0] if _C.shares_process() else is_on()

    def is_anomaly_check_nan_enabled() -> bool:
        return _anomaly.get(threading.get_ident(), before)[1] if _C.shares_process() else checks()

    for owner in (torch, torch._C):
        replace(owner, "set_anomaly_enabled", set_anomaly_enabled)
        replace(owner, "is_anomaly_enabled", is_anomaly_enabled)
        replace(owner, "is_anomaly_check_nan_enabled", is_anomaly_check_nan_enabled)
    undo.append(lambda: change(*before) if _anomaly else None)


# --- Forward-mode AD: one level, that ranks are in together -------------------------------------------------


def _share_forward_ad() -> None:
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    make, unpack, nest = forward_ad.make_dual, forward_ad.unpack_dual, eager_transforms.jvp_increment_nesting

    def enter_dual_level() -> int:
        return _C.enter_dual_level() if _C.shares_process() else enter()

    def exit_dual_level(*, level: int | None = None) -> None:
        _C.exit_dual_level(is_failing=False) if _C.shares_process() else leave(level=level)

    def leave_scope(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        _C.exit_dual_level(is_failing=exc_type is not None) if _C.shares_process() else leave()

    def make_dual(tensor: torch.Tensor, tangent: torch.Tensor, *, level: int | None = None) -> Any:
        return make(tensor, tangent, level=0 if level is None and _C.is_in_dual_level() else level)

    def unpack_dual(tensor: torch.Tensor, *, level: int | None = None) -> Any:
        return unpack(tensor, level=0 if level is None and _C.is_in_dual_level() else level)

    @contextlib.contextmanager
    def jvp_increment_nesting() -> Iterator[int]:
        """The level is entered here; torch does so where its count of nested calls, which is one for the process, is 1."""
        if not _C.shares_process():
            with nest() as level:
                yield level
            return
        is_outermost = not getattr(of_thread, "jvp", False)
        level = eager_transforms._jvp_increment_nesting()
        try:
            if is_outermost:
                _C.enter_dual_level()
                of_thread.jvp = True
            is_failing = True
            try:
                yield level
                is_failing = False
            finally:
                if is_outermost:
                    of_thread.jvp = False
                    _C.exit_dual_level(is_failing)
        finally:
            eager_transforms._jvp_decrement_nesting()

    replace(forward_ad, "enter_dual_level", functools.wraps(enter)(enter_dual_level))
    replace(forward_ad, "exit_dual_level", functools.wraps(leave)(exit_dual_level))
    replace(forward_ad, "make_dual", functools.wraps(make)(make_dual))
    replace(forward_ad, "unpack_dual", functools.wraps(unpack)(unpack_dual))
    replace(forward_ad.dual_level, "__exit__", leave_scope)
    replace(eager_transforms, "jvp_increment_nesting", jvp_increment_nesting)


# --- The profiler: for one rank at a time -------------------------------------------------------------------

#: (thread, rank)
_profiled: tuple[int, int] | None = None


def _share_profiler() -> None:
    """Two threads of a process that profile at the same time crash it."""
    prepare, enable, disable = (
        profiler._prepare_profiler,
        profiler._enable_profiler,
        profiler._disable_profiler,
    )

    def claimed(start: Callable[..., Any]) -> Callable[..., Any]:
        def claim(*args: Any, **kwargs: Any) -> Any:
            global _profiled
            if _C.shares_process():
                rank, thread = _C.get_rank(), threading.get_ident()
                with mutex:
                    if _profiled is not None and _profiled[0] != thread:
                        raise RuntimeError(
                            f"Rank {rank} cannot start the profiler, which is one for the process, while rank {_profiled[1]} is profiled. "
                            "Profile one of the ranks that are threads, or all of them from around tessera.run."
                        )
                    _profiled = (thread, rank)
            return start(*args, **kwargs)

        return functools.wraps(start)(claim)

    def release(*args: Any, **kwargs: Any) -> Any:
        global _profiled
        result = disable(*args, **kwargs)
        if _profiled is not None and _profiled[0] == threading.get_ident():
            _profiled = None
        return result

    replace(profiler, "_prepare_profiler", claimed(prepare))
    replace(profiler, "_enable_profiler", claimed(enable))
    replace(profiler, "_disable_profiler", functools.wraps(disable)(release))


# --- Saved tensors that may be written ----------------------------------------------------------------------


def _share_mutation_of_saved_tensors() -> None:
    """torch says in one variable whether a thread is inside of `allow_mutation_on_saved_tensors`. On ranks it says whether one of them is."""
    original = graph.allow_mutation_on_saved_tensors
    inside = 0

    def count(change: int) -> None:
        nonlocal inside
        with mutex:
            inside += change
            graph._allow_mutation_on_saved_tensors_enabled = inside > 0
        of_thread.allows_mutation = change > 0

    @contextlib.contextmanager
    def allow_mutation_on_saved_tensors() -> Iterator[Any]:
        if not _C.shares_process():
            with original() as context:
                yield context
            return
        if getattr(of_thread, "allows_mutation", False):
            raise RuntimeError("allow_mutation_on_saved_tensors contexts cannot be nested")
        context = graph._AllowMutationOnSavedContext()
        with graph._swap_with_cloned(context), graph._CloneArgBeforeMutateMode(context):
            count(1)
            try:
                yield context
            finally:
                context.clear()
                count(-1)

    replace(
        graph,
        "allow_mutation_on_saved_tensors",
        functools.wraps(original)(allow_mutation_on_saved_tensors),
    )


def share() -> None:
    global _profiled
    _profiled = None
    _share_anomaly_mode()
    _share_forward_ad()
    _share_profiler()
    _share_mutation_of_saved_tensors()
