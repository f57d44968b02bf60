"""Settings of the process: changed by all ranks together."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.backends.mha
import torch.backends.opt_einsum
import torch.utils.checkpoint

from tessera import _C
from tessera._process.replaced import of_thread, replace

checkpoint: Any = torch.utils.checkpoint
mha: Any = torch.backends.mha
opt_einsum: Any = torch.backends.opt_einsum.m  # type: ignore[attr-defined]

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
        if not _C.shares_process() or getattr(of_thread, "changes", False) or is_so(*args, **kwargs):
            return change(*args, **kwargs)
        what = (
            f"{name}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"
        )
        _C.meet(what)
        of_thread.changes = True
        try:
            return change(*args, **kwargs)
        finally:
            of_thread.changes = False
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
            replace(torch._C, setter, _together(f"torch._C.{setter}", change, is_so))
    dtype = torch._C._set_default_dtype
    replace(
        torch._C,
        "_set_default_dtype",
        _together("torch.set_default_dtype", dtype, equals(torch.get_default_dtype)),
    )
    tensor_type = torch._C._set_default_tensor_type
    replace(
        torch._C,
        "_set_default_tensor_type",
        _together("torch.set_default_tensor_type", tensor_type, lambda given: False),
    )

    get_precision = torch._C._get_fp32_precision_getter
    replace(
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
        replace(owner, setter, _together(name, getattr(owner, setter), equals(getattr(owner, getter))))

    assign: Any = torch.backends.ContextProp.__set__

    def assigned(self: Any, module: Any, value: Any) -> None:  # torch.backends.cudnn.deterministic = ...
        name = f"torch.backends, {getattr(self.setter, '__name__', 'a flag')}"
        _together(name, lambda value: assign(self, module, value), equals(self.getter))(value)

    replace(torch.backends.ContextProp, "__set__", assigned)


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

        replace(checkpoint, setter, functools.wraps(original)(scoped))

    scope("set_checkpoint_early_stop", "_enable_checkpoint_early_stop")
    scope("set_checkpoint_debug_enabled", "_checkpoint_debug_enabled")


def share() -> None:
    _share_settings()
    _share_checkpointing()
