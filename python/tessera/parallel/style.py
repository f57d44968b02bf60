"""Styles: how the parameters, inputs and outputs of a module are placed.

Each acts along the last dim of the mesh it is applied on. Layouts are placements along that dim; along the others, if there are any,
parameters are replicated and activations stay as they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from tessera import _C
from tessera._api import DTensor, distribute_tensor
from tessera._C import DeviceMesh, Placement, Replicate, Shard, _StridedShard
from tessera._module import distribute_module

#: The layouts of several values; None for what is left alone.
Layouts = Placement | tuple[Placement | None, ...]


class ParallelStyle(ABC):
    """How a module is made parallel. Yours is a class with a method ``_apply(module, device_mesh)`` that does so and returns the module."""

    #: The rank of the mesh whose parameters count, or None: see parallelize_module, which sets it.
    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def _place(self, module: nn.Module, name: str, mesh: DeviceMesh, layout: Placement) -> None:
        """Distribute a parameter of the module, if it has one of that name."""
        parameter = getattr(module, name, None)
        if parameter is not None:
            placements = _on(mesh, layout)
            module.register_parameter(name, distribute_tensor(parameter, mesh, placements, src_data_rank=self.src_data_rank))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        fields = (f"{name}={value}" for name, value in vars(self).items() if name != "src_data_rank")
        return f"{type(self).__name__}({', '.join(fields)})"


class _CutParallel(ParallelStyle):
    """What ColwiseParallel and RowwiseParallel share."""

    #: By kind of module: the dim along which each parameter is cut; None for replicas.
    _cuts: dict[str, dict[str, int | None]]

    def __init__(self, input_layouts: Placement, output_layouts: Placement, use_local_output: bool) -> None:
        self.input_layouts = (input_layouts,)
        self.output_layouts = (output_layouts,)
        self.use_local_output = use_local_output

    def _desired_input(self, kind: str) -> Placement:
        raise NotImplementedError

    def _cut(self, dim: int) -> Placement:
        return Shard(dim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind = _kind_of(module)
        if kind is None:
            raise NotImplementedError(
                f"{type(self).__name__}: knows nn.Linear, nn.Embedding and Conv1D (of transformers), not {type(module).__name__}. Place its parameters "
                "with a partition_fn of distribute_module, or in a ParallelStyle of your own, and its inputs and outputs with PrepareModuleInputOutput."
            )
        desired = self._desired_input(kind)

        def partition(name: str, each: nn.Module, mesh: DeviceMesh) -> None:
            for parameter, dim in self._cuts[kind].items():
                self._place(each, parameter, mesh, Replicate() if dim is None else self._cut(dim))

        def before(each: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            what = f"the input of {type(self).__name__} on {type(each).__name__}"
            features = None if kind == "embedding" else cast(torch.Tensor, each.weight).shape[1 if kind == "linear" else 0]
            return (_distributed(inputs[0], mesh, self.input_layouts[0], desired, what, features), *inputs[1:])

        def after(each: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            outputs = _redistributed(outputs, self.output_layouts[0])
            return outputs.to_local() if self.use_local_output else outputs

        return distribute_module(module, device_mesh, partition, before, after)


class ColwiseParallel(_CutParallel):
    """Cut the outputs of an nn.Linear, nn.Embedding, or Conv1D of transformers: each rank computes some of the features.

    ``input_layouts``: how an input that is a plain tensor is placed; replicated by default. ``output_layouts``: how the output is to be
    placed; cut along the last dim by default, as it comes. ``use_local_output``: whether the output is what this rank holds of it, a plain
    tensor, rather than a distributed one. ``blocks``: into how many pieces of one size the model splits the output; each of them is cut, so that
    splitting moves nothing. Of a projection to queries, keys and values in one, as GPT-2's ``c_attn``: 3.
    """

    _cuts = {"linear": {"weight": 0, "bias": 0}, "embedding": {"weight": 1}, "conv1d": {"weight": 1, "bias": 0}}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        blocks: int = 1,
    ) -> None:
        if blocks < 1:
            raise ValueError(f"ColwiseParallel: blocks is the number of pieces that the output is split into, and positive; got {blocks}.")
        self.blocks = blocks
        super().__init__(input_layouts or Replicate(), output_layouts or self._cut(-1), use_local_output)

    def _desired_input(self, kind: str) -> Placement:
        return Replicate()

    def _cut(self, dim: int) -> Placement:
        return Shard(dim) if self.blocks == 1 else _StridedShard(dim, split_factor=self.blocks)


class RowwiseParallel(_CutParallel):
    """Cut the inputs of an nn.Linear or Conv1D of transformers, or the table of an nn.Embedding by rows: each rank computes a part of every
    feature's sum.

    ``input_layouts``: how an input that is a plain tensor is placed; cut along the last dim by default. ``output_layouts``: how the output is
    to be placed; replicated by default, which takes an all-reduce; cut, it takes a reduce-scatter. ``use_local_output``: whether the output is
    what this rank holds of it, a plain tensor, rather than a distributed one.
    """

    _cuts = {"linear": {"weight": 1, "bias": None}, "embedding": {"weight": 0}, "conv1d": {"weight": 0, "bias": None}}

    def __init__(self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)

    def _desired_input(self, kind: str) -> Placement:
        return Replicate() if kind == "embedding" else Shard(-1)


class SequenceParallel(ParallelStyle):
    """Replicate the parameters, and let each rank compute a part of the sequence: for nn.LayerNorm, nn.RMSNorm, nn.Dropout and the like.

    A plain input is taken to be this rank's part already, perhaps of another size than the others', of which the ranks tell one another; a
    distributed one is cut so. ``sequence_dim``: the dim that is cut.
    ``use_local_output``: whether the output is what this rank holds of it, a plain tensor, rather than a distributed one.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut = self.sequence_sharding[0]

        def partition(name: str, each: nn.Module, mesh: DeviceMesh) -> None:
            for parameter in list(each._parameters):
                self._place(each, parameter, mesh, Replicate())

        def before(each: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            what = f"the input of SequenceParallel on {type(each).__name__}"
            return (_distributed(inputs[0], mesh, cut, cut, what), *inputs[1:])

        def after(each: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local() if self.use_local_output else outputs

        return distribute_module(module, device_mesh, partition, before, after)

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, use_local_output={self.use_local_output})"


class PrepareModuleInput(ParallelStyle):
    """Make distributed tensors of a module's inputs, and place them as it wants them.

    ``input_layouts``: how the positional arguments are placed if they are plain tensors; one placement, or a tuple with one for each, with None
    for what is left alone. ``desired_input_layouts``: how they are to be placed. ``input_kwarg_layouts``, ``desired_input_kwarg_layouts``: the
    same for keyword arguments, by name. A layout for an argument that is a tuple, list or dict holds for all the tensors in it.
    ``use_local_output``: whether the module gets what this rank holds of them, as plain tensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _tuple(input_layouts)
        self.desired_input_layouts = _tuple(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if (self.input_layouts is None) != (self.desired_input_layouts is None):
            raise ValueError("PrepareModuleInput: give both input_layouts and desired_input_layouts, or neither.")
        _check_lengths("PrepareModuleInput", self.input_layouts or (), self.desired_input_layouts or (), "input_layouts", "desired_input_layouts")
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise ValueError(
                f"PrepareModuleInput: input_kwarg_layouts names {sorted(self.input_kwarg_layouts)}, but desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}; give both for each."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            where = f"of {type(each).__name__}, which PrepareModuleInput prepares,"
            if self.input_layouts is not None and self.desired_input_layouts is not None:
                if len(args) != len(self.input_layouts):
                    raise ValueError(
                        f"PrepareModuleInput: {type(each).__name__} was called with {len(args)} positional arguments, but input_layouts has "
                        f"{len(self.input_layouts)} entries; use None for arguments to leave alone, and input_kwarg_layouts for those by name."
                    )
                args = tuple(
                    self._prepare(value, device_mesh, given, desired, f"argument {position} {where}")
                    for position, (value, given, desired) in enumerate(zip(args, self.input_layouts, self.desired_input_layouts))
                )
            kwargs = {
                name: self._prepare(
                    value, device_mesh, self.input_kwarg_layouts.get(name), self.desired_input_kwarg_layouts.get(name), f"argument '{name}' {where}"
                )
                for name, value in kwargs.items()
            }
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def _prepare(self, value: Any, mesh: DeviceMesh, given: Placement | None, desired: Placement | None, what: str) -> Any:
        if given is None:
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(self._prepare(each, mesh, given, desired, what) for each in value)
        if isinstance(value, dict):
            return {key: self._prepare(each, mesh, given, desired, what) for key, each in value.items()}
        value = _distributed(value, mesh, given, desired, what)
        return value.to_local() if self.use_local_output else value


class PrepareModuleOutput(ParallelStyle):
    """Make distributed tensors of a module's outputs, and place them as is wanted.

    ``output_layouts``: how the outputs are placed if they are plain tensors; one placement, or a tuple with one for each, with None for what is
    left alone. ``desired_output_layouts``: how they are to be placed. ``use_local_output``: whether they are returned as what this rank holds of
    them, plain tensors.
    """

    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True) -> None:
        self.output_layouts = _tuple(output_layouts) or ()
        self.desired_output_layouts = _tuple(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _check_lengths("PrepareModuleOutput", self.output_layouts, self.desired_output_layouts, "output_layouts", "desired_output_layouts")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def after(each: nn.Module, args: Any, outputs: Any) -> Any:
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(values) != len(self.output_layouts):
                raise ValueError(
                    f"PrepareModuleOutput: {type(each).__name__} returned {len(values)} values, but output_layouts has "
                    f"{len(self.output_layouts)} entries; use None for values to leave alone."
                )
            prepared = tuple(
                self._prepare(value, device_mesh, given, desired, f"output {position} of {type(each).__name__}, which PrepareModuleOutput prepares,")
                for position, (value, given, desired) in enumerate(zip(values, self.output_layouts, self.desired_output_layouts))
            )
            return prepared if len(prepared) > 1 else prepared[0]

        module.register_forward_hook(after)
        return module

    def _prepare(self, value: Any, mesh: DeviceMesh, given: Placement | None, desired: Placement | None, what: str) -> Any:
        if given is None:
            return value
        value = _distributed(value, mesh, given, desired, what)
        return value.to_local() if self.use_local_output else value


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one. ``use_local_input`` is the former's ``use_local_output``."""

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts, use_local_output=use_local_output
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.prepare_module_output._apply(self.prepare_module_input._apply(module, device_mesh), device_mesh)


def _kind_of(module: nn.Module) -> str | None:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    # A linear layer whose weight is the other way round, of a package that need not be there.
    return "conv1d" if any(base.__name__ == "Conv1D" for base in type(module).__mro__) else None


def _on(mesh: DeviceMesh, layout: Placement, like: torch.Tensor | None = None) -> tuple[Placement, ...]:
    """The layout along the mesh's last dim; along the others, replicated or as another tensor is."""
    others = (Replicate(),) * (mesh.ndim - 1) if like is None else _C.placements(like)[:-1]
    return (*others, layout)


def _distributed(value: Any, mesh: DeviceMesh, given: Placement, desired: Placement | None, what: str, features: int | None = None) -> Any:
    """The value as a distributed tensor: placed as given if it is a plain one, and then as desired. ``features``: the size of its last dim, so
    that ranks need not ask one another if it is that which is cut."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} is {type(value).__name__}, but its layout is {given}; expected a tensor, or None for the layout.")
    if not _C.is_dtensor(value):
        if mesh.ndim > 1:
            raise ValueError(
                f"{what} is a plain tensor. On a mesh of {mesh.ndim} dims it would not be clear what the ranks along the others hold: give it a distributed "
                'tensor, or make the module parallel on a mesh of one dim, such as mesh["tp"].'
            )
        shape = [*value.shape[:-1], features] if features is not None and given in (Shard(-1), Shard(value.ndim - 1)) else None
        # Parts may differ in size, and each rank knows only its own.
        ask = shape is None and isinstance(given, (Shard, _StridedShard))
        try:
            value = DTensor.from_local(value, mesh, _on(mesh, given), run_check=ask, shape=shape)
        except ValueError as error:
            raise ValueError(f"{what} is a plain tensor, but no part of one placed {given}: {error}") from None
    elif _C.device_mesh(value) != mesh:
        raise ValueError(f"{what} is on {_C.device_mesh(value)}, but the module was made parallel on {mesh}.")
    return value if desired is None else _redistributed(value, desired)


def _redistributed(value: Any, layout: Placement) -> Any:
    if isinstance(layout, (Shard, _StridedShard)) and layout.dim < 0:
        dim = layout.dim + value.ndim
        layout = Shard(dim) if isinstance(layout, Shard) else _StridedShard(dim, split_factor=layout.split_factor)
    if _C.placements(value)[-1] == layout:
        return value
    return value.redistribute(placements=_on(_C.device_mesh(value), layout, like=value), async_op=True)


def _tuple(layouts: Layouts | None) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else None if layouts is None else tuple(layouts)


def _check_lengths(who: str, one: tuple[Any, ...], other: tuple[Any, ...], name: str, other_name: str) -> None:
    if len(one) != len(other):
        raise ValueError(f"{who}: {name} has {len(one)} entries, but {other_name} has {len(other)}; they must be as many.")

