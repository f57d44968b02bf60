"""ZeRO-3: parameters, gradients and optimizer states are sharded, and a part of the model is gathered while it computes."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

import tessera
from tessera import _C
from tessera._api import _mesh
from tessera._C import DeviceMesh, Shard, ShardUnit

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


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


@dataclass
class OffloadPolicy:
    """Parameters, gradients and optimizer states stay on the mesh's device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """They stay on the CPU; on a mesh of another device this is refused. ``pin_memory`` is there for code that was written for PyTorch."""

    pin_memory: bool = True


class _Unit:
    """A unit, and where its modules have its parameters: while it computes, these have the gathered ones."""

    def __init__(self, modules: list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        self.modules, self.mesh, self.policy = modules, mesh, policy
        self.slots: list[list[tuple[nn.Module, str]]] = []  # of each parameter: several, if modules share it
        self.parameters: list[nn.Parameter] = []
        self.calls = 0  # of its modules, inside of one another
        self.is_open = False  # slots have gathered parameters
        self.to_run: set[int] = set()  # modules that have not been called yet, by id
        self.lists: list[_Unit] = []  # units of several modules inside of this one
        self.lenders: list[_Unit] = []  # units inside of this one, of which its modules share parameters
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
        """Whether inputs are those of this rank alone; None if no tensors are seen."""
        tensors = list(_tensors(values))
        return not any(_C.is_distributed_on(tensor, self.mesh) for tensor in tensors) if tensors else None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Of each call of a module of the unit. :meth:`after` is called for each, too, even if this fails."""
        self.calls += 1
        if self.calls == 1 and id(module) not in self.to_run:
            self.end()  # of a pass that did not call all modules
            self.refresh()
        if self.policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), self.policy.param_dtype)
        if not self.is_open:
            self.shards.begin_forward(self.is_local((args, kwargs)))
            self.is_open = True
            self.to_run = {id(each) for each in self.modules}
        for index, slots in enumerate(self.slots):
            gathered = self.shards.gathered(index)
            for owner, name in slots:
                owner._parameters[name] = gathered  # type: ignore[assignment]
        return args, kwargs

    def after(self, module: nn.Module, output: Any) -> Any:
        if self.calls == 0:  # another hook failed, before ours
            return output
        self.calls -= 1
        self.to_run.discard(id(module))
        if output is None and sys.exc_info()[0] is not None:
            self.to_run.clear()  # it failed: who knows what is called next
        if self.calls == 0 and not self.to_run:
            self.end()
            output = _cast(output, self.policy.output_dtype)
        # Plain tensors cannot bring their memory back themselves when backward reads it.
        for value in _tensors(output):
            if value.requires_grad and not _C.is_distributed_on(value, self.mesh):
                value.register_hook(lambda _: self.begin_backward())  # type: ignore[no-untyped-call]
        return output

    def begin_backward(self) -> None:
        for each in (self, *self.lenders):
            each.shards.begin_backward()

    def end(self) -> None:
        """Its modules have their sharded parameters again."""
        if not self.is_open:
            return
        self.is_open = False
        self.to_run.clear()
        for each in self.lists:
            each.end()  # of which not all modules were called
        for slots, parameter in zip(self.slots, self.parameters, strict=True):
            for module, name in slots:
                module._parameters[name] = parameter
        self.shards.end_forward()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Those in containers, and in fields of dataclasses."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value) and not isinstance(value, type):
            yield from _tensors([getattr(value, field.name, None) for field in fields(value)])


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
        return UnshardHandle() if async_op else None

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


class UnshardHandle:
    """What :meth:`FSDPModule.unshard` returns with ``async_op``. The parameters are there already."""

    def wait(self) -> None:
        """Nothing: they are there."""


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Nothing: units have no streams that they could share."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"share_comm_ctx: expected modules that fully_shard has sharded, got {type(module).__name__}."
            )


def _check_offload(policy: Any, mesh: DeviceMesh) -> None:
    """By name: PyTorch's are as good."""
    name = type(policy).__name__
    if (
        policy is None
        or name == "OffloadPolicy"
        or (name == "CPUOffloadPolicy" and mesh.device_type == "cpu")
    ):
        return
    raise NotImplementedError(
        f"fully_shard: offload_policy {policy!r} is not supported on a mesh of {mesh.device_type}: parameters stay on its device. Leave it out."
    )


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

    The module is a unit (several modules are one, if a list of them is given: from the call of the first until all were called, in any order, or
    the unit around them ends): before ``forward`` its parameters are gathered, in one collective, and its attributes are these; then they are
    freed, and gathered again for backward, which reduce-scatters their gradients in one collective. Batches are of one of two kinds, which the
    inputs of ``forward`` say:

    - plain tensors: each rank has a batch of its own, parameters are plain (or distributed along other mesh dims, as "tp", only), and
      gradients are averaged over the ranks;
    - distributed on ``mesh``: the batch is the global one, and so is the loss; gradients are sums.

    Tensors are looked for in containers and dataclasses. If the outermost unit is given none, its batch counts as plain.

    ``mesh``: of one dim, which shards, or of two, of which the first replicates (HSDP); slices of the mesh of tensor parallel parameters. By
    default all ranks.
    ``reshard_after_forward``: whether parameters are freed after forward. By default all are but those of the outermost unit. A number
    of ranks, which divides that of the mesh dim: they stay sharded over groups of so many neighbours, who gather them for backward.
    ``shard_placement_fn``: gives the ``Shard(dim)`` of a parameter; by default the first dim. Any dim, of any size.
    ``mp_policy``: see :class:`MixedPrecisionPolicy`; that of PyTorch is as good.
    ``offload_policy``: :class:`CPUOffloadPolicy` on the CPU, where it changes nothing.
    ``ignored_params``: parameters to leave alone.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        if isinstance(each, FSDPModule):
            raise RuntimeError(f"fully_shard: this {type(each).__name__} was sharded already.")
    where = _all_ranks() if mesh is None and not _C.has_current_mesh() else _mesh(mesh)
    if where.ndim > 2:
        raise ValueError(f"fully_shard: expected a mesh of one or two dims, as mesh['dp'], got {where}.")
    _check_offload(offload_policy, where)
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
    for inner in _inner_units(unit):
        unit.shards.adopt(inner.shards)
        if len(inner.modules) > 1:
            unit.lists.append(inner)
    for each in modules:
        kind = type(each)
        each.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        each._unit = unit  # type: ignore[assignment]
        each.register_forward_pre_hook(unit.before, prepend=True, with_kwargs=True)
        each.register_forward_hook(lambda module, args, output: unit.after(module, output), always_call=True)
    return module


# Parameters that were sharded, by the tensors that they replaced: other modules may have these still.
_replaced: Any = WeakTensorKeyDictionary()


def _inner_units(unit: _Unit) -> list[_Unit]:
    inner = [each._unit for root in unit.modules for each in root.modules() if isinstance(each, FSDPModule)]
    return list(dict.fromkeys(inner))


def _lender(unit: _Unit, module: nn.Module, name: str) -> tuple[_Unit, int] | None:
    """The unit inside of this one that has sharded the parameter, and where it has it."""
    owner, index = _replaced.get(module._parameters[name], (None, 0))
    lender = owner() if owner is not None else None
    if lender is None:
        return None
    if lender not in _inner_units(unit):
        raise ValueError(
            f"fully_shard: the parameter '{name}' of this {type(module).__name__} is shared with another unit. Make one unit of both modules, "
            f"fully_shard([first, second]), or shard a module that has both."
        )
    return lender, index


def _shard(
    unit: _Unit, shard_placement_fn: Callable[[nn.Parameter], Any] | None, ignored: Iterable[nn.Parameter]
) -> list[str]:
    """Replaces the parameters of the unit by sharded ones; their names. Whatever is refused is so before anything is changed."""
    skipped = {id(parameter) for parameter in ignored}
    dims: dict[int, int] = {}
    found: list[tuple[str, nn.Module, str, tuple[_Unit, int] | None]] = []
    seen: set[nn.Module] = set()
    for root in unit.modules:
        for path, module in root.named_modules(seen):
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in skipped or ShardUnit.has(parameter):
                    continue
                found.append((f"{path}.{name}" if path else name, module, name, _lender(unit, module, name)))
                if found[-1][-1] is None and id(parameter) not in dims:
                    dims[id(parameter)] = _dim_of(parameter, shard_placement_fn)
                    _C.check_shard_dim(parameter, unit.mesh, dims[id(parameter)])
    known: dict[int, int] = {}
    names: list[str] = []
    for full_name, module, name, lent in found:
        parameter = getattr(module, name)
        if lent is not None:
            owner, index = lent
            if owner not in unit.lenders:
                unit.lenders.append(owner)
        else:
            owner, index = unit, known.setdefault(id(parameter), len(names))
        if owner is unit and index == len(names):
            sharded = nn.Parameter(
                _C.shard_parameter(parameter, unit.mesh, dims[id(parameter)]), parameter.requires_grad
            )
            sharded.__dict__.update(parameter.__dict__)
            _replaced[parameter] = (weakref.ref(unit), index)
            names.append(full_name)
            unit.parameters.append(sharded)
            unit.slots.append([])
        owner.slots[index].append((module, name))
        setattr(module, name, owner.parameters[index])  # which some modules notice: recurrent ones
    return names


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a fully sharded module gather its parameters, as ``forward`` does. Does nothing for other modules."""
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name)
    unit = module._unit

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            args, kwargs = unit.before(module, args, kwargs)
            output = method(*args, **kwargs)
        finally:
            output = unit.after(module, output)
        return output

    setattr(module, method_name, wrapped)
