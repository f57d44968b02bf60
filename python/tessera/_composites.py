"""Functions that torch wrote in Python and that make tensors of their own: given distributed ones, they make distributed ones."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.masked
from torch.nn.modules import linear_cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import _C
from tessera._api import distribute_tensor

_aten = torch.ops.aten
#: lift_fresh is what torch.tensor ends with.
_CONSTANTS = {_aten.arange, _aten.empty, _aten.lift_fresh, _aten.ones, _aten.zeros}
#: And what they write into a tensor of these sizes.
_RANDOM: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    _aten.rand: lambda x: x.uniform_(),
    _aten.randn: lambda x: x.normal_(),
    _aten.randperm: lambda x: torch.randperm(len(x), out=x),
}


class _Replicating(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is made while it lasts is the same on all ranks of the mesh; random numbers are ours."""

    def __init__(self, mesh: _C.DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _RANDOM:
            size, dtype = (args[0], None) if isinstance(args[0], Sequence) else ([args[0]], torch.int64)
            empty = torch.empty(size, **{"dtype": dtype, **kwargs})
            return _RANDOM[func.overloadpacket](distribute_tensor(empty, self._mesh, src_data_rank=None))
        result = func(*args, **kwargs)
        if func.overloadpacket in _CONSTANTS:
            return distribute_tensor(result, self._mesh, src_data_rank=None)
        return result


def _on_dtensors(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = next((argument for argument in (*args, *kwargs.values()) if _C.is_dtensor(argument)), None)
        if given is None:
            return original(*args, **kwargs)
        with _Replicating(_C.device_mesh(given)):
            return original(*args, **kwargs)

    # So that TorchScript compiles the original, and chooses among its forms as before.
    function.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
    function.__original_fn = original  # type: ignore[attr-defined]
    forms = torch._jit_internal.boolean_dispatched.get(original)
    if forms is not None:
        torch._jit_internal.boolean_dispatched[function] = forms
    return function


_FUNCTIONS: list[tuple[str, list[ModuleType]]] = [
    ("embedding_bag", [torch.nn.functional]),
    ("fractional_max_pool2d", [torch.nn.functional]),
    ("fractional_max_pool2d_with_indices", [torch.nn.functional]),
    ("fractional_max_pool3d", [torch.nn.functional]),
    ("fractional_max_pool3d_with_indices", [torch.nn.functional]),
    ("get_approximate_basis", [torch._lowrank]),
    ("sparse_", [torch.nn.init]),
    ("mean", [torch.masked._ops, torch.masked]),
    ("_std_var", [torch.masked._ops]),
    ("_unravel_index", [torch.functional]),
    ("_linear_cross_entropy_batch_chunked_accumulator", [linear_cross_entropy]),
]


def install() -> None:
    for name, modules in _FUNCTIONS:
        function = _on_dtensors(getattr(modules[0], name))
        for module in modules:
            setattr(module, name, function)
