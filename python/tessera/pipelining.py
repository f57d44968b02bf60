"""Pipelines: the stages of a model on different ranks, as ``torch.distributed.pipelining`` has them.

    from tessera.pipelining import PipelineStage, Schedule1F1B

    mesh = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = PipelineStage(part, mesh.get_local_rank("pp"), 2, group=mesh["pp"])
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
    print(schedule.table.grid())
    schedule.step(batch, target=targets, losses=losses)

A schedule is a table of what each rank does, which is checked before it runs. Stages may pass on plain tensors, or distributed ones on
other dims of the mesh; they exchange shapes and dtypes in the first step, so that no example inputs are needed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from tessera import _C
from tessera._api import _mesh
from tessera._C import DeviceMesh, GradientReduction, PipelineBatch, PipelineSimulation, PipelineTable
from tessera._mesh import init_device_mesh
from tessera.parallel.replicate import ReplicatedModule

__all__ = [
    "PipelineSchedule",
    "PipelineSimulation",
    "PipelineStage",
    "PipelineTable",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "get_schedule_class",
]


class PipelineStage:
    """A part of a model that one rank along a mesh dim computes: stage 0 gets the inputs, each other one the outputs of the one before it.

    ``submodule`` takes tensors and returns a tensor or a tuple of them. Stage ``s`` is on rank ``s % size`` of ``group``: a mesh of one dim
    such as ``mesh["pp"]``, or a process group; all ranks by default. Tensors that are distributed on other dims go to the next stage as they
    are, if ``group`` is a mesh dim of the same mesh. ``device``, ``input_args`` and ``output_args`` are there for code that was written
    for PyTorch, and not needed: the mesh knows the device, and stages exchange what they are going to send.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str | None = None,
        input_args: Any = None,
        output_args: Any = None,
        *,
        group: "DeviceMesh | dist.device_mesh.DeviceMesh | dist.ProcessGroup | None" = None,
    ) -> None:
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.mesh = _mesh_of(group, torch.device(device).type if device is not None else "cpu")
        self._stage = _C.PipelineStage(
            self._forward,
            self._reductions,
            lambda: list(submodule.parameters()),
            stage_index,
            num_stages,
            self.mesh,
        )
        self._structure: pytree.TreeSpec | None = None  # of the inputs of the first stage
        self._rest: list[Any] = []  # those of them that are no tensors
        self._kwargs: Sequence[Mapping[str, Any]] = ()  # of each micro-batch
        self._returns_one = True

    @property
    def is_first(self) -> bool:
        """Whether it gets the inputs."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gets the targets."""
        return self.stage_index == self.num_stages - 1

    @property
    def group_rank(self) -> int:
        """Which rank of its mesh this is."""
        return self.mesh.get_local_rank()

    @property
    def group_size(self) -> int:
        """How many ranks its mesh has."""
        return self.mesh.size()

    def _forward(self, inputs: list[torch.Tensor], microbatch: int) -> list[torch.Tensor]:
        args: Sequence[Any] = inputs
        if self.is_first and self._structure is not None:
            tensors = iter(inputs)
            leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self._rest]
            args = pytree.tree_unflatten(leaves, self._structure)
        result = self.submod(*args, **(self._kwargs[microbatch] if self._kwargs else {}))
        self._returns_one = isinstance(result, torch.Tensor)
        outputs = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(outputs, list | tuple) or not all(
            isinstance(each, torch.Tensor) for each in outputs
        ):
            raise TypeError(
                f"Stage {self.stage_index} of a pipeline returns a tensor or a tuple of tensors, not {type(result).__name__}."
            )
        return list(outputs)

    def _reductions(self) -> list[GradientReduction]:
        return [module._reduction for module in self.submod.modules() if isinstance(module, ReplicatedModule)]


#: Stands for a tensor among the inputs of the first stage.
_TENSOR = object()


def _mesh_of(group: Any, device_type: str) -> DeviceMesh:
    if group is None:
        return init_device_mesh(device_type, (_C.get_world_size(),))
    if isinstance(group, dist.ProcessGroup):
        return DeviceMesh.from_group(group, device_type)
    return _mesh(group)


class PipelineSchedule:
    """Trains the stages of a model together, as a table says. Each rank of the stages' mesh makes one with its own stages, in order, and
    calls it with the others.

    ``table`` may be one of your own: it is checked before it runs. ``loss_fn(output, target)`` is the loss of a micro-batch. If ``scale_grads``, it is a
    mean over its samples, and the gradients are those of the mean over the batch, as on one device; micro-batches count as much as they have
    samples. Else losses and gradients are added.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        table: PipelineTable,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        scale_grads: bool = True,
    ) -> None:
        self.table = table
        self._stages = list(stages)
        self._loss_fn = loss_fn
        self._scale_grads = scale_grads
        self._runner = _C.PipelineRunner([stage._stage for stage in stages], table)
        self._evaluator: _C.PipelineRunner | None = None  # made when it is needed

    def step(
        self,
        *args: Any,
        target: torch.Tensor | None = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a batch; return the outputs, on the rank of the last stage.

        ``args`` are looked at on the rank of the first stage and ``target`` on that of the last; ``kwargs`` go to the stages of this rank.
        Their tensors are split into micro-batches along dim 0; shards along dim 0 are split on each rank. ``losses`` gets the losses of the
        micro-batches, on the rank of the last stage. Gradients are added to those that are there. Those of a replicated module
        are reduced once, in its last backward.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "step() computes gradients, which torch.no_grad() forbids. Call eval() instead."
            )
        return self._run(self._runner, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def eval(
        self,
        *args: Any,
        target: torch.Tensor | None = None,
        losses: list[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The same without backward: outputs, and losses if there is a ``target``."""
        if self._evaluator is None:
            self._evaluator = _C.PipelineRunner(
                [stage._stage for stage in self._stages], self.table.without_backward()
            )
        return self._run(self._evaluator, args, kwargs, target, losses, True, None)

    def _run(
        self,
        runner: _C.PipelineRunner,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.Tensor | None,
        losses: list[torch.Tensor] | None,
        return_outputs: bool,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> Any:
        def prepare() -> PipelineBatch:
            batch = PipelineBatch()
            batch.is_mean = self._scale_grads
            batch.return_outputs = return_outputs
            self._split_kwargs(kwargs)
            if runner.has_first:
                self._split_args(batch, args, kwargs)
            if runner.has_last and self._loss_fn is not None and target is not None:
                self._set_loss(batch, self._loss_fn, target, loss_kwargs or {})
            return batch

        try:
            found, outputs = runner.run(prepare)
        finally:
            for stage in self._stages:
                stage._kwargs = ()
        if losses is not None and runner.has_last:
            losses[:] = found
        if not (return_outputs and runner.has_last):
            return None
        merged = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
        return merged[0] if self._stages[-1]._returns_one else tuple(merged)

    def _split_kwargs(self, kwargs: dict[str, Any]) -> None:
        count = self.table.microbatches
        leaves, structure = pytree.tree_flatten(kwargs)
        parts = [
            _C.split_microbatches(leaf, count) if isinstance(leaf, torch.Tensor) else [leaf] * count
            for leaf in leaves
        ]
        for stage in self._stages:
            stage._kwargs = [
                pytree.tree_unflatten([part[i] for part in parts], structure) for i in range(count)
            ]

    def _split_args(self, batch: PipelineBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count = self.table.microbatches
        leaves, structure = pytree.tree_flatten(args)
        first = self._stages[0]
        first._structure = structure
        first._rest = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        every = [*tensors, *(leaf for leaf in pytree.tree_leaves(kwargs) if isinstance(leaf, torch.Tensor))]
        if not every:
            raise ValueError("A pipeline needs its inputs on the rank of the first stage, but got no tensor.")
        parts = [_C.split_microbatches(tensor, count) for tensor in tensors]
        batch.inputs = [[part[i] for part in parts] for i in range(count)]
        batch.samples = [part.size(0) for part in _C.split_microbatches(every[0], count)]
        batch.input_rule = _C.split_rule(every[0], count)

    def _set_loss(
        self,
        batch: PipelineBatch,
        loss_fn: Callable[..., torch.Tensor],
        target: torch.Tensor,
        loss_kwargs: Mapping[str, Any],
    ) -> None:
        targets = _C.split_microbatches(target, self.table.microbatches)
        last = self._stages[-1]

        def loss(outputs: list[torch.Tensor], microbatch: int) -> torch.Tensor:
            output = outputs[0] if last._returns_one else tuple(outputs)
            return loss_fn(output, targets[microbatch], **loss_kwargs)

        batch.set_loss(loss)
        batch.target_rule = _C.split_rule(target, self.table.microbatches)


def _check_single(name: str, stage: PipelineStage) -> None:
    if stage.num_stages != stage.group_size:
        raise ValueError(
            f"{name} has one stage on each rank, but there are {stage.num_stages} stages on {stage.group_size} ranks. "
            "ScheduleInterleaved1F1B takes several."
        )


class ScheduleGPipe(PipelineSchedule):
    """All forwards, then all backwards."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        scale_grads: bool = True,
    ) -> None:
        _check_single("ScheduleGPipe", stage)
        table = PipelineTable.gpipe(stage.num_stages, n_microbatches)
        super().__init__([stage], table, loss_fn, scale_grads=scale_grads)


class Schedule1F1B(PipelineSchedule):
    """One forward, one backward in turn: keeps the activations of as many micro-batches as there are stages, at most."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        scale_grads: bool = True,
    ) -> None:
        _check_single("Schedule1F1B", stage)
        table = PipelineTable.one_f_one_b(stage.num_stages, n_microbatches)
        super().__init__([stage], table, loss_fn, scale_grads=scale_grads)


class ScheduleInterleaved1F1B(PipelineSchedule):
    """The same with several stages on each rank, which makes the bubble shorter. Takes any number of micro-batches."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        scale_grads: bool = True,
    ) -> None:
        if not stages:
            raise ValueError("A pipeline schedule needs the stages of this rank, but got none.")
        ranks = stages[0].group_size
        table = PipelineTable.interleaved_1f1b(ranks, stages[0].num_stages // ranks, n_microbatches)
        super().__init__(stages, table, loss_fn, scale_grads=scale_grads)


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The class of that name: "GPipe", "1F1B" or "Interleaved1F1B", in any case."""
    classes = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved1f1b": ScheduleInterleaved1F1B}
    if schedule_name.lower() not in classes:
        raise ValueError(
            f'There is no schedule "{schedule_name}"; there are GPipe, 1F1B and Interleaved1F1B.'
        )
    return classes[schedule_name.lower()]
