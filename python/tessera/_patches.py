"""What torch.Tensor has to know about distributed tensors, whose type it is.

Operators need none of this: it is for what Python code does with a tensor besides. Each patch asks first whether the tensor is
distributed, and otherwise does what torch did.
"""

import copy
import functools
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

from tessera import _C, _accelerate, _dynamo, _functional, _functorch, _nesting, _rebuild
from tessera._api import DTensor, distribute_tensor


class _OnDTensors:
    """An attribute of torch.Tensor that only distributed ones have."""

    def __init__(self, name: str, attribute: Any) -> None:
        self._name = name
        self._attribute = attribute
        self.__doc__ = attribute.__doc__

    def __get__(self, instance: torch.Tensor | None, owner: type) -> Any:
        if instance is None:
            return self._attribute
        if _functorch.wraps_dtensor(instance):
            if isinstance(self._attribute, property):
                instance = _functorch.inside(instance)
        elif not _C.is_dtensor(instance):
            raise AttributeError(
                f"'{owner.__name__}' object has no attribute '{self._name}': the tensor is not distributed.",
                name=self._name,
                obj=instance,
            )
        return self._attribute.__get__(instance, owner)


_ATTRIBUTES = (
    "placements",
    "device_mesh",
    "to_local",
    "full_tensor",
    "redistribute",
    "_local_tensor",
    "_spec",
    "_raise_if_contains_partial_placements",
    "__create_write_items__",
    "__create_chunk_list__",
    "__get_tensor_shard__",
)


def _repr(tensor: torch.Tensor) -> str:
    fields = [
        f"local_tensor={_C.local_tensor(tensor)}",
        f"shape={tuple(tensor.shape)}",
        f"device_mesh={_C.device_mesh(tensor)}",
        f"placements={_C.placements(tensor)}",
    ]
    if tensor.grad_fn is not None:
        fields.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        fields.append("requires_grad=True")
    return f"DTensor({', '.join(fields)})"


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only tensors that are no result of operators (graph leaves) can be deep-copied; detach() or clone() this one."
        )
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    with torch.no_grad():
        result: torch.Tensor = memo.setdefault("tessera", _C.Copies()).copy(tensor)  # type: ignore[call-overload]
        result.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            result.grad = copy.deepcopy(tensor.grad, memo)
        result.__dict__ = copy.deepcopy(tensor.__dict__, memo)
    memo[id(tensor)] = result
    return result


def _replace(name: str, replacement: Any) -> None:
    """On distributed tensors, let `replacement` do what the method `name` of torch.Tensor does on others."""
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.is_dtensor(self):
            return replacement(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(torch.Tensor, name, method)


def _refuse_numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("A distributed tensor has no numpy array: call full_tensor() or to_local() first.")


def _is_same_size(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Of global shapes, also of a plain tensor and a distributed one."""
    return tensor.shape == other.shape


def _new_tensor(
    tensor: torch.Tensor,
    data: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Replicated, as what other functions of this kind make."""
    made = torch.tensor(
        data,
        dtype=dtype or tensor.dtype,
        device=device or tensor.device,
        requires_grad=requires_grad,
        **kwargs,
    )
    return distribute_tensor(made, _C.device_mesh(tensor), src_data_rank=None)


def _teach_comparison(module: ModuleType) -> None:
    """Let torch.testing.assert_close compare distributed tensors as it does torch's own: placements, meshes, and what each rank holds."""
    original = module._unwrap_dtensor_for_comparison

    @functools.wraps(original)
    def unwrap(actual: Any, expected: Any) -> tuple[Any, Any]:
        distributed = [_C.is_dtensor(actual), _C.is_dtensor(expected)]
        if not any(distributed):
            return original(actual, expected)  # type: ignore[no-any-return]
        if not all(distributed):
            raise TypeError(
                "Comparing a DTensor to a non-DTensor is ambiguous: call full_tensor() to compare the global tensor, or to_local() to "
                "compare what this rank holds."
            )
        for what, of in (("placements", _C.placements), ("device meshes", _C.device_mesh)):
            if of(actual) != of(expected):
                raise AssertionError(f"DTensor {what} do not match: {of(actual)} != {of(expected)}")
        return _C.local_tensor(actual), _C.local_tensor(expected)

    module._unwrap_dtensor_for_comparison = unwrap  # type: ignore[attr-defined]


class _WhenImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function with a module once it has been imported."""

    def __init__(self, name: str, function: Any) -> None:
        self._name = name
        self._function = function
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._function(module)


def _when_imported(name: str, function: Any) -> None:
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _WhenImported(name, function))


def install() -> None:
    for name in _ATTRIBUTES:
        setattr(torch.Tensor, name, _OnDTensors(name, DTensor.__dict__[name]))
    _replace("__repr__", lambda tensor, *, tensor_contents=None: _repr(tensor))
    _replace("__deepcopy__", _deepcopy)
    _replace("_reduce_ex_internal", lambda tensor, proto: _rebuild.reduce_dtensor(tensor))
    _replace("tolist", lambda tensor: tensor.full_tensor().tolist())
    _replace("new_tensor", _new_tensor)
    torch.Tensor.is_same_size = _is_same_size  # type: ignore[method-assign,assignment]
    _replace("numpy", _refuse_numpy)
    _replace("__array__", _refuse_numpy)
    _functorch.install()
    _when_imported("accelerate.state", _accelerate.teach)
    _when_imported("accelerate.parallelism_config", _accelerate.teach_parallelism)
    _when_imported("torch._dynamo.convert_frame", _dynamo.teach_frames)
    _when_imported("torch._dynamo.variables.builder", _dynamo.teach_builder)
    _when_imported("torch.distributed._functional_collectives", _functional.teach)
    _when_imported("torch.distributed.tensor._api", _nesting.teach_tensors)
    _when_imported("torch.distributed.fsdp._fully_shard._fsdp_init", _nesting.teach_fully_shard)
    _when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", _nesting.teach_fsdp)
    _when_imported("torch.nn.parallel.distributed", _nesting.teach_ddp)
    for name in ("torch.testing._comparison", "torch.testing._internal.common_utils"):
        _when_imported(name, _teach_comparison)
