"""The plan that a model of the transformers package ships, as styles of ours.

Between its layers each rank has plain tensors, and the model's code runs as it is: a rank has some of the heads, and all of the tokens.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tessera import _C, _functorch
from tessera._api import DTensor
from tessera._C import DeviceMesh, Partial, Placement, Replicate, Shard, _StridedShard
from tessera.parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel


def _gradient_summed(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same tensor, which all ranks have, where each makes a part of its gradient."""
    return _functorch.to_local(DTensor.from_local(value, mesh), [Partial()])


def _summed(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of what the ranks have."""
    return _functorch.full_tensor(DTensor.from_local(value, mesh, [Partial()]), None)


class _Forward(ParallelStyle):
    """A style that changes what ``forward`` of a module does, with ``forward(module, call, mesh, *args, **kwargs)``."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind, style = type(module), self

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return style.forward(
                self,
                lambda *args, **kwargs: kind.forward(self, *args, **kwargs),
                device_mesh,
                *args,
                **kwargs,
            )

        module.__class__ = type(f"Parallel{kind.__name__}", (kind,), {"forward": forward, "_style": self})
        return module

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        raise NotImplementedError


@contextlib.contextmanager
def _with_parameters(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, the module's own parameters are what `change` makes of them."""
    before = dict(module._parameters)
    module._parameters.update({name: change(each) for name, each in before.items() if each is not None})  # type: ignore[misc]
    try:
        yield
    finally:
        module._parameters.update(before)


class _LocalParameters(_Forward):
    """Parameters of a module are sharded, and its code sees this rank's part of them."""

    def __init__(self, placements: dict[str, Placement]) -> None:
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            self._distribute(module, name, device_mesh, placement)
        return super()._apply(module, device_mesh)

    def local(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        return _with_parameters(module, lambda each: _C.to_local(each, None) if _C.is_dtensor(each) else each)

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        with self.local(module):
            return call(*args, **kwargs)


class _ShardedExperts(_LocalParameters):
    """Each rank has a part of every expert, and their outputs are sums over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in module.named_parameters():
            if self.placements.get(name, Replicate()).is_replicate():
                raise ValueError(
                    f"parallelize_module: the plan shards the experts of {type(module).__name__}, but not their '{name}', which would be added "
                    'once for each rank. Use plan="experts".'
                )
        return super()._apply(module, device_mesh)

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        def prepared(value: Any) -> Any:
            differentiable = isinstance(value, torch.Tensor) and value.is_floating_point()
            return _gradient_summed(value, mesh) if differentiable else value

        with self.local(module):
            result = call(*map(prepared, args), **{name: prepared(value) for name, value in kwargs.items()})
        return _summed(result, mesh)


class _LocalExperts(_LocalParameters):
    """Each rank has some of the experts, and computes what the tokens get from them; the results are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        count = next(len(module.get_parameter(name)) for name in self.placements)
        if count % device_mesh.size():
            raise ValueError(
                f"parallelize_module: {count} experts of {type(module).__name__} cannot be shared evenly among {device_mesh.size()} ranks. "
                'Use a mesh whose size divides them, or plan="auto", which shards each expert.'
            )
        self.count = count // device_mesh.size()
        module.num_experts = self.count  # type: ignore[assignment]
        return super()._apply(module, device_mesh)

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        given, indices, scores = (*args, *kwargs.values())
        hidden = _gradient_summed(given, mesh).flatten(0, -2)
        weights = _gradient_summed(scores, mesh).flatten(0, -2)
        chosen = indices.flatten(0, -2) - mesh.get_local_rank() * self.count
        tokens, slots = torch.where((chosen >= 0) & (chosen < self.count))
        rows, experts = hidden[tokens], chosen[tokens, slots]
        count = len(tokens)
        if (
            count == 0
        ):  # so that gradients, of parameters too, are zero rather than none, as the other ranks have some
            rows, experts = rows.sum(0, keepdim=True), experts.new_zeros(1)
        with self.local(module):
            computed = call(rows, experts[:, None], torch.ones_like(experts[:, None], dtype=weights.dtype))
        computed = computed[:count] * weights[tokens, slots, None]
        result = torch.zeros_like(hidden).index_add(0, tokens, computed.to(hidden.dtype))
        return _summed(result, mesh).view_as(given)


def has_local_experts(module: nn.Module) -> bool:
    """Whether its parameters are those of experts that other ranks do not have."""
    return isinstance(getattr(type(module), "_style", None), _LocalExperts)


class _PartialGradients(_Forward):
    """Parameters are replicated, but each rank uses them on its own heads, so that their gradients are sums over the ranks."""

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        with _with_parameters(module, lambda each: _gradient_summed(each, mesh)):
            return call(*args, **kwargs)


class _SummedOutput(_Forward):
    """Outputs are sums over the ranks."""

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        return _summed(call(*args, **kwargs), mesh)


class _OneOfMany(_Forward):
    """All ranks compute the same, and what they return is summed afterwards."""

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        return call(args[0] / mesh.size(), *args[1:], **kwargs)


class _RotatedKeys(_Forward):
    """A projection whose last features go to every head as they are: each rank makes a part of their gradient."""

    def __init__(self, features: int) -> None:
        self.features = features

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        output = call(*args, **kwargs)
        passed, rotated = output.split([output.shape[-1] - self.features, self.features], dim=-1)
        return torch.cat([passed, _gradient_summed(rotated, mesh)], dim=-1)


class _AsItIs(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


#: What the names in a plan mean for a module.
_MODULES: dict[str, Callable[[Any], ParallelStyle]] = {
    "colwise": lambda config: ColwiseParallel(),
    "colwise_gather_output": lambda config: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda config: ColwiseParallel(output_layouts=Replicate()),
    "packed_colwise": lambda config: ColwiseParallel(blocks=2),
    "rowwise": lambda config: RowwiseParallel(),
    "rowwise_split_input": lambda config: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda config: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda config: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda config: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": lambda config: SequenceParallel(use_local_output=True),
    "replicated_with_grad_allreduce": lambda config: _PartialGradients(),
    "all_reduce": lambda config: _SummedOutput(),
    "moe_identity_expert": lambda config: _OneOfMany(),
    "mla_kv_a_proj": lambda config: _RotatedKeys(config.qk_rope_head_dim),
    "ep_router": lambda config: _AsItIs(),  # experts choose the tokens that are theirs
    "replicate": lambda config: _AsItIs(),
}
_EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")


def _for_parameter(style: str, name: str, dims: int) -> Placement | None:
    """What a name in a plan means for a parameter by itself."""
    if style == "colwise":
        return Shard(max(dims - 2, 0))
    if style == "rowwise":
        return Replicate() if name == "bias" else Shard(dims - 1)
    if style == "packed_colwise" and not name.endswith("bias"):
        return _StridedShard(max(dims - 2, 0), split_factor=2)
    if style == "packed_rowwise":
        return Replicate() if dims == 1 else _StridedShard(dims - 1, split_factor=2)
    if style == "grouped_gemm":
        return Shard(0)
    return Replicate() if style == "replicate" else None


def _generic(name: str) -> str:
    """As plans have it: numbers of layers are wildcards."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _with_unsharded_heads(rules: dict[str, str], config: Any, ranks: int) -> dict[str, str]:
    """The rules, where heads that cannot be shared evenly are computed on every rank."""
    heads = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    if all(count is None or count % ranks == 0 for count in heads):
        return rules
    projections = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "q_b_proj", "kv_b_proj")
    attention = {
        path.rpartition(".")[0]
        for path, style in rules.items()
        if style == "colwise" and path.rpartition(".")[2] in projections
    }
    unsharded = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
    unsharded |= {"replicated_with_grad_allreduce": "replicate", "mla_kv_a_proj": "replicate"}
    return {
        path: unsharded.get(style, style) if path.rpartition(".")[0] in attention else style
        for path, style in rules.items()
    }


def styles_of(
    model: nn.Module, mesh: DeviceMesh, local_experts: bool
) -> list[tuple[nn.Module, ParallelStyle]]:
    """The submodules that the model's own plan names, with their styles."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    rules = dict(getattr(model, "tp_plan", None) or {})
    of_experts = dict(getattr(model, "ep_plan", None) or {})
    if not rules and not of_experts:
        raise ValueError(
            f"parallelize_module: {type(model).__name__} ships no plan (tp_plan, as models of transformers do). Give one by hand, such as "
            '{"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}.'
        )
    if mesh.ndim != 1:
        raise ValueError(
            f'parallelize_module: plan="auto" is for a mesh of one dim, but this is {mesh}; give a slice of it, such as mesh["tp"].'
        )
    if local_experts and not of_experts:
        raise ValueError(
            f'parallelize_module: {type(model).__name__} ships no plan for experts (ep_plan); use plan="auto".'
        )

    def within(path: str, plan: dict[str, str]) -> bool:
        return any(path == other or path.startswith(f"{other}.") for other in plan)

    if local_experts:
        rules = {path: style for path, style in rules.items() if not within(path, of_experts)} | of_experts
    else:
        rules = rules | {path: style for path, style in of_experts.items() if not within(path, rules)}
    rules = _with_unsharded_heads(rules, config, mesh.size())

    found: list[tuple[nn.Module, ParallelStyle]] = []
    for path, module in model.named_modules():
        style = rules.get(_generic(path))
        placements: dict[str, Placement] = {}
        is_local = False
        for name, parameter in module.named_parameters(recurse=False):
            of_parameter = rules.get(_generic(f"{path}.{name}" if path else name))
            if of_parameter is not None:
                placement = _for_parameter(of_parameter, name, parameter.dim())
                if placement is None:
                    raise ValueError(_unknown(of_parameter, f"the parameter {path}.{name}"))
                placements[name] = placement
                is_local = is_local or of_parameter == "grouped_gemm"
        if placements:
            if style not in (None, "replicate", *_EXPERTS):
                raise ValueError(_unknown(str(style), f"{path}, whose parameters have styles of their own"))
            kind = (
                _LocalParameters if style not in _EXPERTS else _LocalExperts if is_local else _ShardedExperts
            )
            found.append((module, kind(placements)))
        elif style in _EXPERTS:
            raise ValueError(_unknown(str(style), f"{path}, none of whose parameters has a style"))
        elif style is not None:
            if style not in _MODULES:
                raise ValueError(_unknown(style, path))
            found.append((module, _MODULES[style](config)))
    # An embedding that shares its weight with the head is sharded as that.
    named = {id(module) for module, _ in found}
    heads = {id(module.weight) for module, style in found if isinstance(style, ColwiseParallel)}
    found += [
        (module, _MODULES["embedding_rowwise"](config))
        for module in model.modules()
        if isinstance(module, nn.Embedding) and id(module) not in named and id(module.weight) in heads
    ]
    return found


def check_plain_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the first backward compare the gradients of parameters that the plan does not name, which must be the same on all ranks. They
    are not where such a parameter is used on a rank's own heads or features: then the plan lacks a rule.
    """

    def compare(name: str, gradient: torch.Tensor) -> None:
        norm = gradient.detach().double().norm()
        largest, smallest = (
            _functorch.full_tensor(DTensor.from_local(norm, mesh, [Partial(which)]), None)
            for which in ("max", "min")
        )
        if largest - smallest > 1e-2 * largest:
            raise RuntimeError(
                f"The gradient of {name} differs among the ranks: it is used on what the model's plan shards, but the plan does not name it. "
                f"Before parallelize_module, add a rule for its module: "
                f'model.tp_plan["{_generic(name).rpartition(".")[0]}"] = "replicated_with_grad_allreduce".'
            )

    def watch(name: str, parameter: nn.Parameter) -> None:
        def once(each: torch.Tensor) -> None:
            handle.remove()
            if each.grad is not None and not each.grad.is_meta:
                compare(name, each.grad)

        handle = parameter.register_post_accumulate_grad_hook(once)  # type: ignore[no-untyped-call]

    def before_forward(each: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            first.remove()
            for name, parameter in each.named_parameters():
                # Those of units of fully_shard are gathered now, and none.
                if parameter.requires_grad and parameter.is_leaf and not _C.is_dtensor(parameter):
                    watch(name, parameter)

    first = model.register_forward_pre_hook(before_forward)


def notify_transformers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let its Trainer, and accelerate, know that these processes share one model: they then give them the same batches, and do not
    wrap it for data parallelism. Of ranks that are threads they see one process, which has all of the model.
    """
    if hasattr(model, "_tp_size") and not _C.is_rank_thread():
        model._tp_size = mesh.size()  # type: ignore[assignment]


def _unknown(style: str, where: str) -> str:
    return (
        f"parallelize_module: the model's plan has '{style}' for {where}, which means nothing here. Known are "
        f"{', '.join(sorted({*_MODULES, *_EXPERTS, 'grouped_gemm', 'packed_rowwise'}))}. Give a plan by hand."
    )
