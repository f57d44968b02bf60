"""What is one for the process, and ranks that are threads of it share: see docs/threads.md.

While such ranks run, some functions of torch and of Python's library are replaced by others, which do on a rank what is right there,
and elsewhere what they did before.
"""

import contextlib
import functools
import logging
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch.autograd.forward_ad
import torch.autograd.graph
import torch.autograd.profiler
import torch.backends.mha
import torch.backends.opt_einsum
import torch.nn.modules.module
import torch.nn.utils.parametrize
import torch.optim.optimizer
import torch.utils.checkpoint

from tessera import _C

checkpoint: Any = torch.utils.checkpoint
eager_transforms: Any = torch._functorch.eager_transforms
forward_ad: Any = torch.autograd.forward_ad
graph: Any = torch.autograd.graph
mha: Any = torch.backends.mha
module_hooks: Any = torch.nn.modules.module
opt_einsum: Any = torch.backends.opt_einsum.m  # type: ignore[attr-defined]
optimizer_hooks: Any = sys.modules["torch.optim.optimizer"]  # torch.optim has no such attribute
parametrize: Any = torch.nn.utils.parametrize
profiler: Any = torch.autograd.profiler

_mutex = threading.Lock()  # never held while a rank waits for another
_of_thread = threading.local()

#: What is replaced, (owner, name, original), while ranks run; and how many runs there are.
_replaced: list[tuple[Any, str, Any]] = []
_runs = 0


# --- Settings: changed by all ranks together ------------------------------------------------------------------------------------

#: Functions of torch._C that change a setting of the process, and those that return its value.
_SETTINGS: dict[str, str] = {
    "_set_blas_preferred_backend": "_get_blas_preferred_backend",
    "_set_cpu_allow_fp16_reduced_precision_reduction": "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_bf16_reduced_precision_reduction": "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_set_cublas_allow_fp16_accumulation": "_get_cublas_allow_fp16_accumulation",
    "_set_cublas_allow_fp16_reduced_precision_reduction": "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_tf32": "_get_cublas_allow_tf32",
    "_set_cudnn_allow_tf32": "_get_cudnn_allow_tf32",
    "_set_cudnn_benchmark": "_get_cudnn_benchmark",
    "_set_cudnn_deterministic": "_get_cudnn_deterministic",
    "_set_cudnn_enabled": "_get_cudnn_enabled",
    "_set_deterministic_algorithms": "_get_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory": "_get_deterministic_fill_uninitialized_memory",
    "_set_float32_matmul_precision": "_get_float32_matmul_precision",
    "_set_linalg_preferred_backend": "_get_linalg_preferred_backend",
    "_set_math_sdp_allow_fp16_bf16_reduction": "_get_math_sdp_allow_fp16_bf16_reduction",
    "_set_mkldnn_deterministic": "_get_mkldnn_deterministic",
    "_set_mkldnn_enabled": "_get_mkldnn_enabled",
    "_set_nnpack_enabled": "_get_nnpack_enabled",
    "_set_onednn_allow_tf32": "_get_onednn_allow_tf32",
    "_set_qengine": "_get_qengine",
    "_set_sdp_priority_order": "_get_sdp_priority_order",
    "_set_sdp_use_cudnn": "_get_cudnn_sdp_enabled",
    "_set_sdp_use_flash": "_get_flash_sdp_enabled",
    "_set_sdp_use_math": "_get_math_sdp_enabled",
    "_set_sdp_use_mem_efficient": "_get_mem_efficient_sdp_enabled",
    "_set_sdp_use_overrideable": "_get_overrideable_sdp_enabled",
}


def _together(name: str, change: Callable[..., Any], is_so: Callable[..., bool]) -> Callable[..., Any]:
    """`change`, made by all ranks at the same time: before the first makes it all have come here, and none goes on before all have made it.

    So each of them sees the setting change where its program changes it. `is_so`: whether it is as given already.
    """

    @functools.wraps(change)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if not _C.shares_process() or getattr(_of_thread, "changes", False) or is_so(*args, **kwargs):
            return change(*args, **kwargs)
        what = (
            f"{name}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"
        )
        _C.meet(what)
        _of_thread.changes = True
        try:
            return change(*args, **kwargs)
        finally:
            _of_thread.changes = False
            _C.meet(what)

    return changed


def _share_settings() -> None:
    def equals(get: Callable[[], Any]) -> Callable[..., bool]:
        return lambda value: bool(get() == value)

    def is_deterministic(mode: bool, *, warn_only: bool = False) -> bool:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ) == (mode, warn_only)

    for setter, getter in _SETTINGS.items():
        change, get = getattr(torch._C, setter, None), getattr(torch._C, getter, None)
        if change and get:
            is_so = is_deterministic if setter == "_set_deterministic_algorithms" else equals(get)
            _replace(torch._C, setter, _together(f"torch._C.{setter}", change, is_so))
    dtype = torch._C._set_default_dtype
    _replace(
        torch._C,
        "_set_default_dtype",
        _together("torch.set_default_dtype", dtype, equals(torch.get_default_dtype)),
    )
    tensor_type = torch._C._set_default_tensor_type
    _replace(
        torch._C,
        "_set_default_tensor_type",
        _together("torch.set_default_tensor_type", tensor_type, lambda given: False),
    )

    get_precision = torch._C._get_fp32_precision_getter
    _replace(
        torch._C,
        "_set_fp32_precision_setter",
        _together(
            "torch._C._set_fp32_precision_setter",
            torch._C._set_fp32_precision_setter,
            lambda backend, op, precision: bool(get_precision(backend, op) == precision),
        ),
    )
    # Which operators run depends on these, and so which collectives.
    for owner, setter, getter in (
        (mha, "set_fastpath_enabled", "get_fastpath_enabled"),
        (opt_einsum, "_set_enabled", "_get_enabled"),
        (opt_einsum, "_set_strategy", "_get_strategy"),
    ):
        name = f"{owner.__name__}.{setter}"
        _replace(owner, setter, _together(name, getattr(owner, setter), equals(getattr(owner, getter))))

    assign: Any = torch.backends.ContextProp.__set__

    def assigned(self: Any, module: Any, value: Any) -> None:  # torch.backends.cudnn.deterministic = ...
        name = f"torch.backends, {getattr(self.setter, '__name__', 'a flag')}"
        _together(name, lambda value: assign(self, module, value), equals(self.getter))(value)

    _replace(torch.backends.ContextProp, "__set__", assigned)


def _share_checkpointing() -> None:
    """`with torch.utils.checkpoint.set_checkpoint_early_stop(...)`, and the like: variables that all ranks set together."""

    def scope(setter: str, variable: str) -> None:
        original = getattr(checkpoint, setter)

        def assign(value: Any) -> None:
            setattr(checkpoint, variable, value)

        change = _together(
            f"torch.utils.checkpoint.{setter}", assign, lambda value: getattr(checkpoint, variable) is value
        )

        @contextlib.contextmanager
        def scoped(value: Any) -> Iterator[None]:
            if not _C.shares_process():
                with original(value):
                    yield
                return
            before = getattr(checkpoint, variable)
            change(value)
            try:
                yield
            except BaseException:
                assign(before)  # the others may not come
                raise
            change(before)

        _replace(checkpoint, setter, functools.wraps(original)(scoped))

    scope("set_checkpoint_early_stop", "_enable_checkpoint_early_stop")
    scope("set_checkpoint_debug_enabled", "_checkpoint_debug_enabled")


def _this_thread() -> object:
    """An object of the calling thread. Unlike `threading.get_ident()`, no later thread has the same."""
    if not hasattr(_of_thread, "self"):
        _of_thread.self = object()
    return _of_thread.self  # type: ignore[no-any-return]


class _AtEnd:
    """Calls a function when the thread that keeps it ends."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


# --- Anomaly mode: on while one of the ranks has it on ----------------------------------------------------------------------------

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
        with _mutex:
            _anomaly[thread] = (enabled, check_nan)
            combine()
        if not hasattr(_of_thread, "anomaly"):
            _of_thread.anomaly = _AtEnd(lambda: forget(thread))

    def combine() -> None:
        checks_nan = [check for on, check in [before, *_anomaly.values()] if on]
        change(*((True, any(checks_nan)) if checks_nan else before))

    def forget(thread: int) -> None:
        with _mutex:
            if _anomaly.pop(thread, None) is not None:
                combine()

    def is_anomaly_enabled() -> bool:
        return _anomaly.get(threading.get_ident(), before)[0] if _C.shares_process() else is_on()

    def is_anomaly_check_nan_enabled() -> bool:
        return _anomaly.get(threading.get_ident(), before)[1] if _C.shares_process() else checks()

    for owner in (torch, torch._C):
        _replace(owner, "set_anomaly_enabled", set_anomaly_enabled)
        _replace(owner, "is_anomaly_enabled", is_anomaly_enabled)
        _replace(owner, "is_anomaly_check_nan_enabled", is_anomaly_check_nan_enabled)
    _undo.append(lambda: change(*before) if _anomaly else None)


# --- Forward-mode AD: one level, that ranks are in together ------------------------------------------------------------------------


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
        is_outermost = not getattr(_of_thread, "jvp", False)
        level = eager_transforms._jvp_increment_nesting()
        try:
            if is_outermost:
                _C.enter_dual_level()
                _of_thread.jvp = True
            is_failing = True
            try:
                yield level
                is_failing = False
            finally:
                if is_outermost:
                    _of_thread.jvp = False
                    _C.exit_dual_level(is_failing)
        finally:
            eager_transforms._jvp_decrement_nesting()

    _replace(forward_ad, "enter_dual_level", functools.wraps(enter)(enter_dual_level))
    _replace(forward_ad, "exit_dual_level", functools.wraps(leave)(exit_dual_level))
    _replace(forward_ad, "make_dual", functools.wraps(make)(make_dual))
    _replace(forward_ad, "unpack_dual", functools.wraps(unpack)(unpack_dual))
    _replace(forward_ad.dual_level, "__exit__", leave_scope)
    _replace(eager_transforms, "jvp_increment_nesting", jvp_increment_nesting)


# --- The profiler: for one rank at a time -----------------------------------------------------------------------------------------------

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
                with _mutex:
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

    _replace(profiler, "_prepare_profiler", claimed(prepare))
    _replace(profiler, "_enable_profiler", claimed(enable))
    _replace(profiler, "_disable_profiler", functools.wraps(disable)(release))


# --- Sampling: each rank draws what it would draw alone --------------------------------------------------------------------------------

#: Where torch's default generator stood when the last run began, and which run that is.
_start: tuple[int, torch.Tensor] | None = None


def _sampler() -> torch.Generator:
    """What this rank draws samples of plain tensors with: as torch's default generator in a process of its own."""
    assert _start is not None
    number, state = _start
    if getattr(_of_thread, "sampler_of", None) != number:
        _of_thread.sampler, _of_thread.sampler_of = torch.Generator(), number
        _of_thread.sampler.set_state(state)
    return _of_thread.sampler  # type: ignore[no-any-return]


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

    _replace(torch, "multinomial", on_rank(torch.multinomial))
    _replace(torch.Tensor, "multinomial", on_rank(torch.Tensor.multinomial))


def is_computing_again() -> bool:
    """Whether this rank, a thread, computes a forward again in backward, with random states as they were then."""
    return bool(getattr(_of_thread, "forks", 0))


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
        _of_thread.forks = getattr(_of_thread, "forks", 0) + 1
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
            _of_thread.forks -= 1

    def check(drawn: str) -> None:
        if drawn:
            raise RuntimeError(
                f"Rank {_C.get_rank()} computed a forward again in backward (torch.utils.checkpoint), in which {drawn} draws plain random numbers. "
                "These are other ones than in forward: torch's default generator is one for the process, and ranks that are threads share it. "
                "Draw of distributed tensors (dropout of a DTensor), or with generator=, or start ranks as processes."
            )

    _replace(torch.random, "fork_rng", functools.wraps(fork)(fork_rng))


# --- What each rank has for itself ----------------------------------------------------------------------------------------------------


def _share_mutation_of_saved_tensors() -> None:
    """torch says in one variable whether a thread is inside of `allow_mutation_on_saved_tensors`. On ranks it says whether one of them is."""
    original = graph.allow_mutation_on_saved_tensors
    inside = 0

    def count(change: int) -> None:
        nonlocal inside
        with _mutex:
            inside += change
            graph._allow_mutation_on_saved_tensors_enabled = inside > 0
        _of_thread.allows_mutation = change > 0

    @contextlib.contextmanager
    def allow_mutation_on_saved_tensors() -> Iterator[Any]:
        if not _C.shares_process():
            with original() as context:
                yield context
            return
        if getattr(_of_thread, "allows_mutation", False):
            raise RuntimeError("allow_mutation_on_saved_tensors contexts cannot be nested")
        context = graph._AllowMutationOnSavedContext()
        with graph._swap_with_cloned(context), graph._CloneArgBeforeMutateMode(context):
            count(1)
            try:
                yield context
            finally:
                context.clear()
                count(-1)

    _replace(
        graph,
        "allow_mutation_on_saved_tensors",
        functools.wraps(original)(allow_mutation_on_saved_tensors),
    )


class _OwnCount:
    """A count of scopes that are open, of each thread; true if there are any."""

    def __init__(self, outside: int) -> None:
        self.of_thread = threading.local()
        self.outside = outside  # of those who start the ranks

    def add(self, change: int) -> int:
        self.of_thread.count = getattr(self.of_thread, "count", self.outside) + change
        return int(self.of_thread.count)

    def __bool__(self) -> bool:
        return getattr(self.of_thread, "count", self.outside) > 0


class _OwnValues:
    """What torch uses of a dict, of each thread."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def get(self, key: Any) -> Any:
        return self.of_thread.__dict__.get(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.of_thread.__dict__[key] = value

    def clear(self) -> None:
        self.of_thread.__dict__.clear()


def _share_parametrization_cache() -> None:
    """`torch.nn.utils.parametrize.cached` forgets its values when no thread is inside any more: a rank that leaves, changes its weights and
    enters again would find the old ones while another is inside."""
    count, values = _OwnCount(parametrize._cache_enabled), _OwnValues()

    @contextlib.contextmanager
    def cached() -> Iterator[None]:
        count.add(1)
        try:
            yield
        finally:
            if count.add(-1) == 0:
                values.clear()

    _replace(parametrize, "cached", functools.wraps(parametrize.cached)(cached))
    _replace(parametrize, "_cache_enabled", count)
    _replace(parametrize, "_cache", values)


class _RankHooks(OrderedDict[int, Any]):
    """Hooks of all modules, or of all optimizers: what a rank adds is for that rank alone.

    It takes the place of torch's own dict, which handles of hooks that were added before still know: what they remove there is gone here too.
    """

    def __init__(self, before: "OrderedDict[int, Any]") -> None:
        super().__init__()
        self.before, self.inherited = before, set(before)
        self.owners: dict[int, object] = {}  # the threads of hooks that ranks added
        for key, hook in before.items():
            super().__setitem__(key, hook)

    def __setitem__(self, key: int, hook: Any) -> None:
        if _C.shares_process():
            self.owners[key] = _this_thread()
            if not hasattr(_of_thread, "hooks"):
                _of_thread.hooks = []
            _of_thread.hooks.append(_AtEnd(lambda: self.__delitem__(key) if key in self else None))
        super().__setitem__(key, hook)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self.owners.pop(key, None)

    def items(self) -> Any:
        thread = _this_thread()
        return [
            (key, hook)
            for key, hook in list(super().items())
            if self.owners.get(key, thread) is thread and (key not in self.inherited or key in self.before)
        ]

    def keys(self) -> Any:
        return [key for key, _ in self.items()]

    def values(self) -> Any:
        return [hook for _, hook in self.items()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.keys())


def _share_hooks() -> None:
    """Once, for good: without hooks of ranks these are as torch's own."""
    for owner in (module_hooks, optimizer_hooks):
        for name, hooks in list(vars(owner).items()):
            if name.startswith("_global_") and type(hooks) is OrderedDict:
                setattr(owner, name, _RankHooks(hooks))


# --- Python's library ----------------------------------------------------------------------------------------------------------------


def _share_cached_properties() -> None:
    """Before Python 3.12 a lock, one for all objects of a class, is held while the value is computed: ranks that wait for each other there
    would for ever. On ranks it is done as since then."""
    get = functools.cached_property.__get__
    missing = object()

    def unlocked(self: Any, instance: Any, owner: Any = None) -> Any:
        if (
            instance is None
            or self.attrname is None
            or not hasattr(instance, "__dict__")
            or not _C.shares_process()
        ):
            return get(self, instance, owner)
        value = instance.__dict__.get(self.attrname, missing)
        if value is missing:
            value = self.func(instance)
            instance.__dict__[self.attrname] = value
        return value

    _replace(functools.cached_property, "__get__", unlocked)


def _share_warnings() -> None:
    """Filters are one for the process. When the last rank has left `warnings.catch_warnings` they are what they were before the first
    entered; each by itself would restore what it found, which may be another's."""
    enter, leave = warnings.catch_warnings.__enter__, warnings.catch_warnings.__exit__
    inside = 0
    found: list[Any] = []

    def __enter__(self: Any) -> Any:
        nonlocal inside, found
        if not _C.shares_process():
            return enter(self)
        with _mutex:
            if inside == 0:
                found = [
                    warnings.filters,
                    list(warnings.filters),
                    warnings.showwarning,
                    warnings._showwarnmsg_impl,  # type: ignore[attr-defined]
                ]
            inside += 1
            return enter(self)

    def __exit__(self: Any, *exception: Any) -> None:
        nonlocal inside
        if not _C.shares_process():
            return leave(self, *exception)
        with _mutex:
            leave(self, *exception)
            inside -= 1
            if inside == 0:
                warnings.filters, content, warnings.showwarning, warnings._showwarnmsg_impl = found  # type: ignore[attr-defined]
                warnings.filters[:] = content  # type: ignore[index]
                warnings._filters_mutated()  # type: ignore[attr-defined]

    _replace(warnings.catch_warnings, "__enter__", __enter__)
    _replace(warnings.catch_warnings, "__exit__", __exit__)


def _share_logging() -> None:
    """A handler formats what it is given with its lock held. Where that is a distributed tensor, to format it may be to wait for other ranks,
    which may wait for the lock: on ranks the message is made before."""
    handle = logging.Handler.handle

    def formatted(self: logging.Handler, record: logging.LogRecord) -> Any:
        given = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
        if _C.shares_process() and any(map(_C.is_dtensor, given)):
            record.msg, record.args = record.getMessage(), None
        return handle(self, record)

    _replace(logging.Handler, "handle", functools.wraps(handle)(formatted))


def why_endless() -> str:
    """Why a rank that has been waiting for a while can never be done: called by the library, on that rank."""
    frame: Any = sys._getframe()
    while frame is not None:
        if (
            frame.f_code.co_filename == "<frozen importlib._bootstrap>"
            and frame.f_code.co_name == "_load_unlocked"
        ):
            module = getattr(frame.f_locals.get("spec"), "name", "a module")
            return (
                f"rank {_C.get_rank()} communicates while it imports {module}. A module is imported once in a process: other ranks, "
                "which are threads, wait for that and cannot take part. Communicate in a function, which all ranks call"
            )
        frame = frame.f_back
    return ""


# --- While ranks run -----------------------------------------------------------------------------------------------------------------

_undo: list[Callable[[], Any]] = []


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)


@contextlib.contextmanager
def shared_by_ranks() -> Iterator[None]:
    """Inside, ranks that are threads of this process run."""
    global _runs, _profiled, _start
    with _mutex:
        _runs += 1
        _start = (0 if _start is None else _start[0] + 1, torch.default_generator.get_state())
        if _runs == 1:
            _profiled = None
            _share_settings()
            _share_checkpointing()
            _share_anomaly_mode()
            _share_forward_ad()
            _share_profiler()
            _share_sampling()
            _share_default_generator()
            _share_mutation_of_saved_tensors()
            _share_parametrization_cache()
            _share_hooks()
            _share_warnings()
            _share_logging()
            if sys.version_info < (3, 12):
                _share_cached_properties()
    try:
        yield
    finally:
        with _mutex:
            _runs -= 1
            if _runs == 0:
                while _replaced:
                    owner, name, original = _replaced.pop()
                    setattr(owner, name, original)
                while _undo:
                    _undo.pop()()
