"""parallelize_module: styles for submodules, by their names."""

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from tessera._api import _mesh
from tessera._C import DeviceMesh
from tessera._module import Shared
from tessera.parallel.style import ParallelStyle


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply the styles of ``parallelize_plan`` to ``module`` or its submodules, in place; return it.

    ``parallelize_plan``: one style, for the module itself, or styles by name. A name is the path of a submodule, as in
    "layers.0.attention"; each component of it may have wildcards, as in "layers.*.attention"; "" is the module itself. A name that fits
    nothing is a warning.

    ``device_mesh``: that of the surrounding ``with mesh:`` by default. Styles act along its last dim: on a slice, as ``mesh["tp"]``, the
    tensors know nothing of the other dims; on the full mesh parameters are replicated along the others, and inputs, which must be distributed
    then, stay there as they are.

    ``src_data_rank``: the rank of the mesh whose parameters count; with None each takes its shard of its own, without communication.

    Parameters that several submodules share stay shared, and must get the same placements.

        parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    """
    mesh = _mesh(device_mesh)
    if parallelize_plan is None:
        warnings.warn("parallelize_module: there is no plan, so nothing is done.", stacklevel=2)
        return module
    shared = Shared(module)
    if isinstance(parallelize_plan, ParallelStyle):
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
            f"parallelize_module: expected a ParallelStyle or a dict of them by submodules' names, got {type(parallelize_plan).__name__}."
        )
    shared.restore(or_refuse=True)
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
