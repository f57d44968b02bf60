"""Modules with distributed parameters."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera._api import _mesh, distribute_tensor
from tessera._C import DeviceMesh

PartitionFunction = Callable[[str, nn.Module, DeviceMesh], None]
HookFunction = Callable[[nn.Module, Any, DeviceMesh], Any]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFunction | None = None,
    input_fn: HookFunction | None = None,
    output_fn: HookFunction | None = None,
) -> nn.Module:
    """Make the parameters and buffers of ``module`` distributed tensors, in place; return it.

    ``partition_fn(name, submodule, mesh)`` is called for each submodule, the module itself (with the name "") first, and distributes what it
    wants to. Whatever is left is replicated: all ranks get the values of the mesh's first. What several submodules share stays shared.

    ``input_fn(module, inputs, mesh)`` is called before each forward with its positional arguments, and ``output_fn(module, outputs, mesh)``
    after it with what it returned; what they return takes the place of that.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError(
            f"distribute_module: this {type(module).__name__} was distributed already, which can be done once only."
        )
    mesh = _mesh(device_mesh)
    shared = Shared(module)
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    shared.restore()
    _replicate_rest(module, mesh)
    if input_fn is not None:
        before = _of_three_arguments(input_fn, "input_fn", "inputs")
        module.register_forward_pre_hook(lambda each, inputs: before(each, inputs, mesh))
    if output_fn is not None:
        after = _of_three_arguments(output_fn, "output_fn", "outputs")
        module.register_forward_hook(lambda each, inputs, outputs: after(each, outputs, mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _of_three_arguments(function: Callable[..., Any], name: str, what: str) -> HookFunction:
    count = len(inspect.signature(function).parameters)
    if count == 2:
        warnings.warn(
            f"Deprecating {name} of distribute_module that takes ({what}, device_mesh): let it take (module, {what}, device_mesh). It still works.",
            FutureWarning,
            stacklevel=3,
        )
        return lambda module, values, mesh: function(values, mesh)
    if count != 3:
        raise ValueError(
            f"distribute_module: {name} takes three arguments, (module, {what}, device_mesh); this one takes {count}."
        )
    return function


def _replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    replicas: dict[torch.Tensor, torch.Tensor] = {}

    def replica(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in replicas:
            replicas[tensor] = distribute_tensor(tensor, mesh)
        return replicas[tensor]

    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not _C.is_dtensor(tensor):
                    tensors[name] = replica(tensor)  # type: ignore[assignment]


class Shared:
    """The parameters of a module that several of its submodules have, as the first and last layer of a language model may. Placing them
    makes new ones, which have to be shared again.
    """

    def __init__(self, module: nn.Module) -> None:
        owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
        for path, submodule in module.named_modules():
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    owners.setdefault(parameter, []).append(
                        (f"{path}.{name}" if path else name, submodule, name)
                    )
        self._groups = [group for group in owners.values() if len(group) > 1]

    def restore(self) -> None:
        """Let all submodules that shared a parameter have the first that was placed. They must have been placed alike; one that was
        not placed at all gets it too, and may be parallelised later.
        """
        for group in self._groups:
            parameters = [submodule._parameters[name] for _, submodule, name in group]
            placed = [parameter for parameter in parameters if _C.is_dtensor(parameter)]
            if not placed:
                continue
            ways = {(_C.device_mesh(parameter), _C.placements(parameter)) for parameter in placed}  # type: ignore[arg-type]
            if len(ways) > 1:
                raise ValueError(
                    "These are one parameter, which cannot be placed in several ways: "
                    + ", ".join(
                        f"{path} ({_way(parameter)})" for (path, _, _), parameter in zip(group, parameters)
                    )
                    + ". Choose styles that shard them alike, or give each a parameter of its own first."
                )
            for _, submodule, name in group:
                submodule._parameters[name] = placed[0]


def _way(parameter: torch.Tensor | None) -> str:
    return (
        f"placed {_C.placements(parameter)}"
        if parameter is not None and _C.is_dtensor(parameter)
        else "not distributed"
    )
