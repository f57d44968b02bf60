"""Styles: how the parameters, inputs and outputs of a module are placed.

Each acts along the last dim of the mesh it is applied on. Layouts are placements along that dim; along the others, if there are any,
parameters are replicated and activations stay as they are.

What a style means for a layer is C++'s (``tessera/nn/layer_plan.h``), the same for modules of C++ and Python; here are the hooks.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from tessera import _C
from tessera._api import distribute_tensor
from tessera._C import DeviceMesh, Placement, Replicate, Shard
from tessera._module import distribute_module

#: The layouts of several values; None for what is left alone.
Layouts = Placement | tuple[Placement | None, ...]


class ParallelStyle(ABC):
    """How a module is made parallel. Yours is a class with a method ``_apply(module, device_mesh)`` that does so and returns the module."""

    #: The rank of the mesh whose parameters count, or None: see parallelize_module, which sets it.
    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def _distribute(self, module: nn.Module, name: str, mesh: DeviceMesh, layout: Placement) -> None:
        """Distribute a parameter of the module, if it has one of that name, which is dotted if it is a submodule's."""
        path, _, name = name.rpartition(".")
        owner = module.get_submodule(path)
        parameter = getattr(owner, name, None)
        if parameter is not None:
            placements = (*(Replicate(),) * (mesh.ndim - 1), layout)
            owner.register_parameter(
                name,
                distribute_tensor(parameter, mesh, placements, src_data_rank=self.src_data_rank),  # type: ignore[arg-type]
            )

    def __repr__(self) -> str:
        fields = (f"{name}={value}" for name, value in vars(self).items() if name != "src_data_rank")
        return f"{type(self).__name__}({', '.join(fields)})"


class _LayerParallel(ParallelStyle):
    """What ColwiseParallel and RowwiseParallel share: hooks around a layer that is sharded as its plan says."""

    _style: str
    blocks: int

    def __init__(
        self, input_layouts: Placement | None, output_layouts: Placement | None, use_local_output: bool
    ) -> None:
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind = _kind_of(module)
        plan = None if kind is None else _C.layer_plan(self._style, kind, self.blocks)
        if plan is None:
            _C.refuse_layer(self._style, type(module).__name__)
        if isinstance(module, nn.MultiheadAttention):
            _C.check_heads(module.num_heads, device_mesh, device_mesh.ndim - 1)
        for name, layout in plan.parameters:
            self._distribute(module, name, device_mesh, layout)
        distribute_module(module, device_mesh)
        features = (
            None if plan.feature_dim is None else cast(torch.Tensor, module.weight).shape[plan.feature_dim]
        )
        layer = _C.ParallelLayer(
            self._style,
            plan,
            device_mesh,
            device_mesh.ndim - 1,
            self.input_layouts,
            self.output_layouts,
            features,
            type(module).__name__,
        )
        names = plan.inputs

        def before(
            each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            inputs = [position if position < len(args) else name for position, name in enumerate(names)]
            for key in inputs:
                if not isinstance(values.get(key), torch.Tensor):
                    raise TypeError(
                        f"{type(self).__name__}: argument '{key}' of {type(each).__name__} is {type(values.get(key)).__name__}; expected a tensor."
                    )
            others = [
                key for key, value in values.items() if key not in inputs and isinstance(value, torch.Tensor)
            ]
            keys = (*inputs, *others)
            values.update(zip(keys, layer.prepare_inputs([values[key] for key in keys])))
            return tuple(values[position] for position in range(len(args))), {
                name: values[name] for name in kwargs
            }

        def after(each: nn.Module, args: Any, outputs: Any) -> Any:
            # A layer's own output is the first; MultiheadAttention returns its weights beside it.
            first, rest = (outputs[0], outputs[1:]) if isinstance(outputs, tuple) else (outputs, None)
            first = layer.prepare_output(first)
            if self.use_local_output:
                first = _C.to_local(first, None)
                rest = rest and tuple(
                    value.full_tensor() if _C.is_dtensor(value) else value for value in rest
                )
            return first if rest is None else (first, *rest)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module


class ColwiseParallel(_LayerParallel):
    """Shard what a layer returns: the output features of nn.Linear and of Conv1D of transformers, the columns of nn.Embedding and
    nn.EmbeddingBag, the output channels of convolutions, the heads of nn.MultiheadAttention, whose output projection is then sharded by rows.

    ``input_layouts``: the placement of inputs that are plain tensors; by default as the layer needs them, replicated. ``output_layouts``: the
    placement of the output; by default as the layer returns it, sharded along what was sharded (that of nn.MultiheadAttention is replicated).
    ``use_local_output``: whether to return the local tensor of the output rather than a distributed one. ``blocks``: into how many pieces
    of one size the model splits the output; each of them is sharded, so that splitting does not communicate. A projection to queries, keys and
    values in one, as GPT-2's ``c_attn``, has 3.
    """

    _style = "colwise"

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        blocks: int = 1,
    ) -> None:
        _C.layer_plan(self._style, "linear", blocks)  # refuses bad ones now
        self.blocks = blocks
        super().__init__(input_layouts, output_layouts, use_local_output)


class RowwiseParallel(_LayerParallel):
    """Shard what a layer sums over: the input features of nn.Linear and of Conv1D of transformers, the rows of nn.Embedding and
    nn.EmbeddingBag, the input channels of convolutions.

    ``input_layouts``: the placement of inputs that are plain tensors; by default as the layer needs them: features and channels sharded,
    indices replicated. ``output_layouts``: the placement of the output; replicated by default, which takes an all-reduce; sharded, it takes a
    reduce-scatter. ``use_local_output``: whether to return the local tensor of the output rather than a distributed one.
    """

    _style = "rowwise"
    blocks = 1

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts, output_layouts, use_local_output)


class SequenceParallel(ParallelStyle):
    """Replicate the parameters, and shard inputs along their sequence: for nn.LayerNorm, nn.RMSNorm, nn.Dropout and the like.

    A plain input is taken for this rank's shard already; shards may be uneven, so ranks exchange their sizes. A distributed one is
    redistributed. ``sequence_dim``: the dim that is sharded. ``use_local_output``: whether to return the local tensor of the output rather
    than a distributed one.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = self.sequence_sharding[0]

        def partition(name: str, each: nn.Module, mesh: DeviceMesh) -> None:
            for parameter in list(each._parameters):
                self._distribute(each, parameter, mesh, Replicate())

        def before(each: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            what = f"the input of SequenceParallel on {type(each).__name__}"
            return (_prepare(inputs[0], mesh, layout, layout, what), *inputs[1:])

        def after(each: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local() if self.use_local_output else outputs

        return distribute_module(module, device_mesh, partition, before, after)

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, use_local_output={self.use_local_output})"


class _PrepareModule(ParallelStyle):
    """What PrepareModuleInput and PrepareModuleOutput share."""

    use_local_output: bool

    def _prepare(
        self, value: Any, mesh: DeviceMesh, given: Placement | None, desired: Placement | None, what: str
    ) -> Any:
        if given is None:
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(self._prepare(each, mesh, given, desired, what) for each in value)
        if isinstance(value, dict):
            return {key: self._prepare(each, mesh, given, desired, what) for key, each in value.items()}
        prepared = _prepare(value, mesh, given, desired, what)
        return _C.to_local(prepared, None) if self.use_local_output else prepared


class PrepareModuleInput(_PrepareModule):
    """Make distributed tensors of a module's inputs, and redistribute them as it needs them.

    ``input_layouts``: the placements of positional arguments that are plain tensors; one placement, or a tuple with one for each, with None
    for what is left alone. ``desired_input_layouts``: the placements to redistribute them to, None for what stays as it is. ``input_kwarg_layouts``, ``desired_input_kwarg_layouts``: the
    same for keyword arguments, by name. A layout for an argument that is a tuple, list or dict holds for all the tensors in it.
    ``use_local_output``: whether the module gets their local tensors.
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
            raise ValueError(
                "PrepareModuleInput: give both input_layouts and desired_input_layouts, or neither."
            )
        _check_lengths(
            "PrepareModuleInput",
            self.input_layouts or (),
            self.desired_input_layouts or (),
            "input_layouts",
            "desired_input_layouts",
        )
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise ValueError(
                f"PrepareModuleInput: input_kwarg_layouts names {sorted(self.input_kwarg_layouts)}, but desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}; give both for each."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(
            each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            where = f"of {type(each).__name__}, which PrepareModuleInput prepares,"
            if self.input_layouts is not None and self.desired_input_layouts is not None:
                if len(args) != len(self.input_layouts):
                    raise ValueError(
                        f"PrepareModuleInput: module inputs and input_layouts should have same length! {type(each).__name__} was called with {len(args)} positional arguments, but input_layouts has "
                        f"{len(self.input_layouts)} entries; use None for arguments to leave alone, and input_kwarg_layouts for those by name."
                    )
                args = tuple(
                    self._prepare(value, device_mesh, given, desired, f"argument {position} {where}")
                    for position, (value, given, desired) in enumerate(
                        zip(args, self.input_layouts, self.desired_input_layouts)
                    )
                )
            kwargs = {
                name: self._prepare(
                    value,
                    device_mesh,
                    self.input_kwarg_layouts.get(name),
                    self.desired_input_kwarg_layouts.get(name),
                    f"argument '{name}' {where}",
                )
                for name, value in kwargs.items()
            }
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class PrepareModuleOutput(_PrepareModule):
    """Make distributed tensors of a module's outputs, and redistribute them.

    ``output_layouts``: the placements of outputs that are plain tensors; one placement, or a tuple with one for each, with None for what is
    left alone. ``desired_output_layouts``: the placements to redistribute them to, None for what stays as it is. A layout for an output that
    is a tuple, list or dict holds for all the tensors in it. ``use_local_output``: whether to return their local tensors.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _tuple(output_layouts) or ()
        self.desired_output_layouts = _tuple(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _check_lengths(
            "PrepareModuleOutput",
            self.output_layouts,
            self.desired_output_layouts,
            "output_layouts",
            "desired_output_layouts",
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def after(each: nn.Module, args: Any, outputs: Any) -> Any:
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(values) != len(self.output_layouts):
                raise ValueError(
                    f"PrepareModuleOutput: module outputs and output_layouts should have same length! {type(each).__name__} returned {len(values)} values, but output_layouts has "
                    f"{len(self.output_layouts)} entries; use None for values to leave alone."
                )
            prepared = tuple(
                self._prepare(
                    value,
                    device_mesh,
                    given,
                    desired,
                    f"output {position} of {type(each).__name__}, which PrepareModuleOutput prepares,",
                )
                for position, (value, given, desired) in enumerate(
                    zip(values, self.output_layouts, self.desired_output_layouts)
                )
            )
            return prepared if len(prepared) > 1 else prepared[0]

        module.register_forward_hook(after)
        return module


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
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.prepare_module_output._apply(
            self.prepare_module_input._apply(module, device_mesh), device_mesh
        )


_KINDS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    (nn.Linear, "linear"),
    ((nn.Embedding, nn.EmbeddingBag), "embedding"),
    (nn.Conv1d, "conv1d"),
    (nn.Conv2d, "conv2d"),
    (nn.Conv3d, "conv3d"),
    (nn.ConvTranspose1d, "conv_transpose1d"),
    (nn.ConvTranspose2d, "conv_transpose2d"),
    (nn.ConvTranspose3d, "conv_transpose3d"),
    (nn.MultiheadAttention, "multihead_attention"),
)


def _kind_of(module: nn.Module) -> str | None:
    """The name of the layer's kind in C++."""
    for types, kind in _KINDS:
        if isinstance(module, types):
            return kind
    # Of a package that need not be there.
    return "linear_transposed" if any(base.__name__ == "Conv1D" for base in type(module).__mro__) else None


def _prepare(
    value: Any, mesh: DeviceMesh, if_plain: Placement, desired: Placement | None, what: str
) -> torch.Tensor:
    """The value as a distributed tensor: with the first layout if it is a plain one, and then redistributed to the other."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{what} is {type(value).__name__}, but its layout is {if_plain}; expected a tensor, or None for the layout."
        )
    return _C.prepare_activation(value, mesh, mesh.ndim - 1, if_plain, desired, what)


def _tuple(layouts: Layouts | None) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else None if layouts is None else tuple(layouts)


def _check_lengths(
    who: str, one: tuple[Any, ...], other: tuple[Any, ...], name: str, other_name: str
) -> None:
    if len(one) != len(other):
        raise AssertionError(
            f"{who}: {name} and {other_name} should have same length! {name} has {len(one)} entries, but {other_name} has {len(other)}."
        )
