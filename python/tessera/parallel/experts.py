"""Mixtures of experts: tokens go to the ranks that have their experts, and come back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera._C import DeviceMesh, Shard
from tessera.parallel.auto import _LocalParameters, _with_parameters


def all_to_all_single(
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    device_mesh: DeviceMesh,
    mesh_dim: int | str = 0,
) -> torch.Tensor:
    """The rows that the ranks along a mesh dim send to this one, one after the other in their order. Differentiable.

    Rank ``r`` is sent ``input_split_sizes[r]`` rows of ``input``, a plain tensor, and sends ``output_split_sizes[r]``; None: as many rows to
    each, and from each. :func:`exchange_sizes` finds the output sizes if only the input sizes are known. The gradient is the exchange back,
    so ``backward`` must reach it on every rank or on none.
    """
    return _C.all_to_all_single(
        input, output_split_sizes or [], input_split_sizes or [], device_mesh, mesh_dim
    )


def exchange_sizes(sizes: Sequence[int], device_mesh: DeviceMesh, mesh_dim: int | str = 0) -> list[int]:
    """What the ranks along a mesh dim say to this one, of what each says to each: the output sizes of an :func:`all_to_all_single`."""
    return _C.exchange_sizes(sizes, device_mesh, mesh_dim)


class _Scaled(torch.autograd.Function):
    """The same tensor, whose gradient counts so much."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient * context.factor, None


class ExpertParallel(_LocalParameters):
    """Each rank has some of a mixture's experts, and tokens of its own: they go to the ranks of their experts by all-to-all, and back.

    For modules that are called with (tokens, indices of their experts, weights of these), as the ``experts`` of Mixtral, Qwen3-MoE and most
    mixtures of transformers are: their code stays as it is, and computes with the experts of this rank. Each parameter has a dim 0 of experts,
    which the number of ranks must divide.

    Each rank's loss is that of its own tokens, and counts as one of as many, as with :func:`replicate`, which sees to the other parameters:

        parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
        replicate(model, mesh)
    """

    def __init__(self) -> None:
        super().__init__({})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parameters = dict(module.named_parameters(recurse=False))
        counts = {len(each) for each in parameters.values()}
        if len(counts) != 1 or len(parameters) != len(list(module.parameters())):
            raise ValueError(
                f"ExpertParallel: {type(module).__name__} must have parameters of its own whose dim 0 is the experts, but it has "
                f"{ {name: tuple(each.shape) for name, each in module.named_parameters()} }."
            )
        (count,) = counts
        if device_mesh.ndim != 1:
            raise ValueError(
                f'ExpertParallel is for a mesh of one dim, but this is {device_mesh}; give a slice of it, such as mesh["ep"].'
            )
        if count % device_mesh.size():
            raise ValueError(
                f"ExpertParallel: {count} experts of {type(module).__name__} cannot be shared evenly among {device_mesh.size()} ranks. "
                "Use a mesh whose size divides them."
            )
        self.placements = {name: Shard(0) for name in parameters}
        module.num_experts = count // device_mesh.size()  # type: ignore[assignment]
        return super()._apply(module, device_mesh)

    def forward(
        self, module: nn.Module, call: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        """What the module returns for this rank's tokens."""
        given, indices, scores = (*args, *kwargs.values())
        hidden, chosen, weights = (each.flatten(0, -2) for each in (given, indices, scores))
        here = int(module.num_experts)  # type: ignore[arg-type]
        experts = chosen.flatten()
        ranks = experts // here
        order = ranks.argsort(stable=True)
        tokens = order // chosen.shape[-1]
        sent = ranks.bincount(minlength=mesh.size()).tolist()
        received = exchange_sizes(sent, mesh)
        rows = all_to_all_single(hidden[tokens], received, sent, mesh)
        of_rows = all_to_all_single((experts % here)[order], received, sent, mesh)
        computed = self._compute(module, call, mesh, rows, of_rows, weights.dtype)
        returned = all_to_all_single(computed, sent, received, mesh)
        weighted = returned * weights.flatten()[order, None]
        result = torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))
        return result.view_as(given)

    def _compute(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        mesh: DeviceMesh,
        rows: torch.Tensor,
        experts: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """What the experts of this rank make of some rows."""
        count = len(rows)
        if (
            count == 0
        ):  # so that gradients, of parameters too, are zero rather than none, as the other ranks have some
            rows, experts = rows.sum(0, keepdim=True), experts.new_zeros(1)
        share = 1 / mesh.size()
        with self.local(module), _with_parameters(module, lambda each: _Scaled.apply(each, share)):  # type: ignore[no-untyped-call]
            result = call(rows, experts[:, None], torch.ones_like(experts[:, None], dtype=dtype))
        return result[:count]  # type: ignore[no-any-return]
