"""ZeRO-3: parameters, gradients and optimizer states are sharded, and a part of the model is gathered while it computes."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import tessera
from tessera import _C
from tessera._api import _mesh
from tessera._C import DeviceMesh, Shard, ShardUnit

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "fully_shard", "register_fsdp_forward_method"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes that a unit computes and communicates in; those of its parameters, where not said.

    ``param_dtype``: of gathered parameters. ``reduce_dtype``: gradients are reduced in it, by default as they were computed. ``output_dtype``:
    what ``forward`` returns is cast to it. ``cast_forward_inputs``: its inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class _Unit:
    """A unit, and where its modules have its parameters: while it computes, these have the gathered ones."""

    def __init__(self, modules: list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        self.modules, self.mesh, self.policy = modules, mesh, policy
        self.slots: list[list[tuple[nn.Module, str]]] = []  # of each parameter: several, if modules share it
        self.parameters: list[nn.Parameter] = []
        self.entered = 0
        self.shards: ShardUnit

    def refresh(self) -> None:
        """Others may have replaced parameters: to_empty, load_state_dict(assign=True)."""
        now = [getattr(module, name) for (module, name), *_ in self.slots]
        if all(a is b for a, b in zip(now, self.parameters, strict=True)):
            return
        for (module, name), parameter in zip((slots[0] for slots in self.slots), now, strict=True):
            if not _C.is_dtensor(parameter):
                raise RuntimeError(
                    f"fully_shard: the parameter '{name}' of {type(module).__name__} is sharded no more: something replaced it by a plain one."
                )
        for slots, parameter in zip(self.slots, now, strict=True):
            for module, name in slots:
                setattr(module, name, parameter)
        self.parameters = now
        self.shards.set_parameters(now)

    def is_local(self, values: Any) -> bool | None:
        """Whether inputs are those of this rank alone; None if there are none."""
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        return not any(_C.is_distributed_on(tensor, self.mesh) for tensor in tensors) if tensors else None

    def before(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.entered == 0:
            self.refresh()
        if self.policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), self.policy.param_dtype)
        self.shards.begin_forward(self.is_local((args, kwargs)))
        self.entered += 1
        for index, slots in enumerate(self.slots):
            gathered = self.shards.gathered(index)
            for module, name in slots:
                module._parameters[name] = gathered  # type: ignore[assignment]
        return args, kwargs

    def after(self, output: Any) -> Any:
        if self.entered == 0:  # `before` failed
            return output
        self.entered -= 1
        if self.entered == 0:
            for slots, parameter in zip(self.slots, self.parameters, strict=True):
                for module, name in slots:
                    module._parameters[name] = parameter
        self.shards.end_forward()
        output = _cast(output, self.policy.output_dtype)
        # Plain tensors cannot bring their memory back themselves when backward reads it.
        for value in tree_leaves(output):
            if (
                isinstance(value, torch.Tensor)
                and value.requires_grad
                and not _C.is_distributed_on(value, self.mesh)
            ):
                value.register_hook(lambda _: self.shards.begin_backward())  # type: ignore[no-untyped-call]
        return output


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values
    return tree_map(
        lambda value: (
            value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        ),
        values,
    )


class FSDPModule:
    """What modules gain by :func:`fully_shard`."""

    _unit: _Unit

    def _units(self, recurse: bool) -> list[_Unit]:
        modules = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        return [module._unit for module in modules if isinstance(module, FSDPModule)]

    def unshard(self, async_op: bool = False) -> Any:
        """Gather the parameters of this unit now."""
        self._unit.refresh()
        self._unit.shards.unshard()
        return _Done() if async_op else None

    def reshard(self) -> None:
        """Free the gathered parameters of this unit now."""
        self._unit.shards.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. While it does not, each rank keeps them, unsharded, for the next backward that does."""
        for unit in self._units(recurse):
            unit.shards.set_syncs_gradients(requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after forward, and gathered again for backward."""
        for unit in self._units(recurse):
            unit.shards.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after backward. If not, the next forward has them already."""
        for unit in self._units(recurse):
            unit.shards.set_reshard_after_backward(reshard_after_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """By what sums of gradients of local batches are divided, instead of the number of ranks."""
        self._unit.shards.set_gradient_divisor(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Nothing: gradients are always reduced over all ranks, which gives the same."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing: what is under way ends with each backward."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing: parameters that backward does not need cost no more than what is gathered with them."""

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Nothing: the order of the last pass says what comes next."""

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Nothing: the order of the last pass says what comes next."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "A fully sharded module cannot be copied: copy it before fully_shard, or load its state_dict into another."
        )


class _Done:
    """What has been waited for."""

    def wait(self) -> None: ...


def _all_ranks() -> DeviceMesh:
    return tessera.init_device_mesh("cpu", (tessera.get_world_size(),), mesh_dim_names=("fsdp",))


def _reshards(value: bool | int | None, mesh: DeviceMesh) -> tuple[bool | None, int | None]:
    """Whether parameters are freed after forward, and over how many ranks they stay sharded then, if not over all."""
    if value is None or isinstance(value, bool):
        return value, None
    if not isinstance(value, int) or value < 1 or mesh.size(mesh.ndim - 1) % value:
        raise ValueError(
            f"fully_shard: reshard_after_forward is a bool, or a number of ranks that divides the {mesh.size(mesh.ndim - 1)} that share parameters; "
            f"got {value!r}."
        )
    return value > 1, value if 1 < value < mesh.size(mesh.ndim - 1) else None


def _dim_of(parameter: nn.Parameter, shard_placement_fn: Callable[[nn.Parameter], Any] | None) -> int:
    placement = shard_placement_fn(parameter) if shard_placement_fn is not None else None
    if placement is None:
        return 0
    if not hasattr(placement, "dim"):
        raise ValueError(f"fully_shard: shard_placement_fn returns Shard(dim) or None, got {placement!r}.")
    return int(placement.dim)


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard the parameters of ``module``, but those of units inside of it, over the ranks of ``mesh``, in place; return the module.

    A drop-in for ``torch.distributed.fsdp.fully_shard``. Call it for the parts of a model, then for all of it, and make the optimizer
    afterwards:

        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    The module is a unit: before ``forward`` its parameters are gathered, in one collective, and its attributes are these; then they are
    freed, and gathered again for backward, which reduce-scatters their gradients in one collective. Batches are of one of two kinds, which the
    inputs of ``forward`` say:

    - plain tensors: each rank has a batch of its own, parameters are plain (or distributed along other mesh dims, as "tp", only), and
      gradients are averaged over the ranks;
    - distributed on ``mesh``: the batch is the global one, and so is the loss; gradients are sums.

    ``mesh``: of one dim, which shards, or of two, of which the first replicates (HSDP); slices of the mesh of tensor parallel parameters. By
    default all ranks.
    ``reshard_after_forward``: whether parameters are freed after forward. By default all are but those of the outermost unit. A number
    of ranks, which divides that of the mesh dim: they stay sharded over groups of so many neighbours, who gather them for backward.
    ``shard_placement_fn``: gives the ``Shard(dim)`` of a parameter; by default the first dim. Any dim, of any size.
    ``mp_policy``: see :class:`MixedPrecisionPolicy`; that of PyTorch is as good.
    ``ignored_params``: parameters to leave alone.
    """
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise NotImplementedError(
            f"fully_shard: offload_policy {offload_policy!r} is not supported: parameters stay on the mesh's device. Leave it out."
        )
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        if isinstance(each, FSDPModule):
            raise RuntimeError(f"fully_shard: this {type(each).__name__} was sharded already.")
    where = _all_ranks() if mesh is None and not _C.has_current_mesh() else _mesh(mesh)
    if where.ndim > 2:
        raise ValueError(f"fully_shard: expected a mesh of one or two dims, as mesh['dp'], got {where}.")
    unit = _Unit(modules, where, mp_policy)
    reshards, post_forward_ranks = _reshards(reshard_after_forward, where)
    names = _shard(unit, shard_placement_fn, ignored_params or set())
    unit.shards = ShardUnit(
        names,
        unit.parameters,
        where,
        reshards,
        post_forward_ranks,
        mp_policy.param_dtype,
        mp_policy.reduce_dtype,
    )
    for each in modules:
        for inner in each.modules():
            if isinstance(inner, FSDPModule):
                unit.shards.adopt(inner._unit.shards)
    for each in modules:
        kind = type(each)
        each.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        each._unit = unit  # type: ignore[assignment]
    modules[0].register_forward_pre_hook(
        lambda _, args, kwargs: unit.before(args, kwargs), prepend=True, with_kwargs=True
    )
    modules[-1].register_forward_hook(lambda _, args, output: unit.after(output), always_call=True)
    return module


def _shard(
    unit: _Unit, shard_placement_fn: Callable[[nn.Parameter], Any] | None, ignored: Iterable[nn.Parameter]
) -> list[str]:
    """Replaces the parameters of the unit by sharded ones; their names."""
    skipped = {id(parameter) for parameter in ignored}
    known: dict[int, int] = {}
    names: list[str] = []
    for root in unit.modules:
        for path, module in root.named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None or id(parameter) in skipped or ShardUnit.has(parameter):
                    continue
                index = known.get(id(parameter))
                if index is None:
                    sharded = nn.Parameter(
                        _C.shard_parameter(parameter, unit.mesh, _dim_of(parameter, shard_placement_fn)),
                        parameter.requires_grad,
                    )
                    sharded.__dict__.update(parameter.__dict__)
                    index = known[id(parameter)] = known[id(sharded)] = len(names)
                    names.append(f"{path}.{name}" if path else name)
                    unit.parameters.append(sharded)
                    unit.slots.append([])
                unit.slots[index].append((module, name))
                setattr(module, name, unit.parameters[index])  # which some modules notice: recurrent ones
    return names


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a fully sharded module gather its parameters, as ``forward`` does. Does nothing for other modules."""
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name)
    unit = module._unit

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = unit.before(args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = unit.after(output)
        return output

    setattr(module, method_name, wrapped)
