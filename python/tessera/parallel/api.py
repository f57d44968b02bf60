"""parallelize_module: styles for submodules, by their names."""

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from tessera import _C
from tessera._api import _mesh
from tessera._C import DeviceMesh
from tessera._module import Shared
from tessera.parallel.auto import check_plain_gradients, notify_transformers, styles_of
from tessera.parallel.style import ParallelStyle

#: Styles by the names of submodules, one for the module itself, or the name of a plan.
Plan = ParallelStyle | Mapping[str, ParallelStyle] | Literal["auto", "experts"]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    plan: Plan | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply the styles of ``parallelize_plan`` (or ``plan``, for short) to ``module`` or its submodules, in place; return it.

    ``parallelize_plan``: one style, for the module itself, or styles by name. A name is the path of a submodule, as in
    "layers.0.attention"; each component of it may have wildcards, as in "layers.*.attention"; "" is the module itself. A name that fits
    nothing is a warning.

    "auto": the plan that a model of the transformers package ships, its embedding and head included. "experts": likewise, but each rank has
    some of a mixture's experts, rather than a part of each. The mesh has one dim then; inputs and outputs are plain tensors, the same on all
    ranks; and what the plan does not name is left alone: plain parameters, of which all ranks get those of the first.

    ``device_mesh``: that of the surrounding ``with mesh:`` by default. Styles act along its last dim: on a slice, as ``mesh["tp"]``, the
    tensors know nothing of the other dims; on the full mesh parameters are replicated along the others, and inputs, which must be distributed
    then, stay there as they are.

    ``src_data_rank``: the rank of the mesh whose parameters count; with None each takes its shard of its own, without communication.

    Parameters that several submodules share stay shared, and must get the same placements, by this call or a later one.

        parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    """
    mesh = _mesh(device_mesh)
    if plan is not None:
        if parallelize_plan is not None:
            raise TypeError("parallelize_module: plan is a short name of parallelize_plan; give one of them.")
        parallelize_plan = plan
    if parallelize_plan is None:
        warnings.warn("parallelize_module: there is no plan, so nothing is done.", stacklevel=2)
        return module
    shared = Shared(module)
    if isinstance(parallelize_plan, str):
        if parallelize_plan not in ("auto", "experts"):
            raise ValueError(
                f'parallelize_module: the plans with a name are "auto" and "experts", got {parallelize_plan!r}.'
            )
        for submodule, style in styles_of(module, mesh, parallelize_plan == "experts"):
            _apply(style, submodule, mesh, src_data_rank)
        check_plain_gradients(module, mesh)
        notify_transformers(module, mesh)
        if src_data_rank is not None:
            for tensor in (*module.parameters(), *module.buffers()):
                if not _C.is_dtensor(tensor) and not tensor.is_meta:
                    _C.broadcast_values(tensor, mesh)
    elif isinstance(parallelize_plan, ParallelStyle):
        module = _apply(parallelize_plan, module, mesh, src_data_rank)
    elif isinstance(parallelize_plan, Mapping):
        for path, style in parallelize_plan.items():
            if not isinstance(style, ParallelStyle):
                raise TypeError(
                    f"parallelize_module: the plan has {style!r} for '{path}'; expected a ParallelStyle, such as ColwiseParallel()."
                )
            for submodule in _find(module, path):
                _apply(style, submodule, mesh, src_data_rank)
    else:
        raise TypeError(
            f"parallelize_module: expected a ParallelStyle, a dict of them by submodules' names, or 'auto', got {type(parallelize_plan).__name__}."
        )
    shared.restore()
    return module


def _apply(style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
    style.src_data_rank = src_data_rank
    return style._apply(module, mesh)


def _find(module: nn.Module, path: str) -> list[nn.Module]:
    """The submodules that a path with wildcards names. A warning if there are none."""
    found = [("", module)]
    if path == "":
        return [module]
    for component in path.split("."):
        children = [
            (f"{prefix}.{name}".lstrip("."), child)
            for prefix, parent in found
            for name, child in parent.named_children()
        ]
        matching = [
            (name, child) for name, child in children if fnmatchcase(name.rpartition(".")[2], component)
        ]
        if not matching:
            names = sorted({name for name, _ in children})
            warnings.warn(
                f"parallelize_module: the plan's '{path}' fits no submodule of {type(module).__name__} and is skipped: nothing is named "
                f"'{component}' among {', '.join(names[:10]) or 'no submodules'}{', ...' if len(names) > 10 else ''}.",
                stacklevel=3,
            )
            return []
        found = matching
    return [child for _, child in found]
