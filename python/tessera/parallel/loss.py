"""Losses of logits whose classes are sharded."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tessera import _C, _functorch
from tessera._api import DTensor
from tessera._C import Placement, Replicate, Shard


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, ``cross_entropy`` (``nn.CrossEntropyLoss``) of distributed logits moves none of them between ranks, or is an error.

    Classes may be sharded along any mesh dims, and so may the batch; each rank computes with its local logits, and only sums over the classes
    are reduced. That is so without this context too. Inside it, logits that would have to be moved first are refused, and plain tensors are taken
    for targets and weights if all ranks have all of them: where the batch is not sharded. Label smoothing, class weights, ``ignore_index`` and all
    reductions work, on meshes of any number of dims; the loss is that of the global batch, and replicated where classes are sharded.
    With targets that are indices of classes, and without label smoothing, backward needs no communication; its gradients cannot be
    differentiated again.

        with loss_parallel():
            loss = F.cross_entropy(logits, targets)     # logits: [Shard(0), Shard(1)], targets: [Shard(0), Replicate()]
            loss.backward()
    """
    with _LossParallel():
        yield


_SIGNATURE = inspect.signature(functional.cross_entropy)


class _LossParallel(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is functional.cross_entropy:
            bound = _SIGNATURE.bind(*args, **(kwargs or {}))
            logits = bound.arguments["input"]
            if not _C.is_dtensor(logits):
                return func(*args, **(kwargs or {}))
            _prepare(bound.arguments)
            bound.apply_defaults()
            if _has_class_indices(bound.arguments):
                of_classes = (
                    bound.arguments[name] for name in ("target", "weight", "ignore_index", "reduction")
                )
                return _reduced(_CrossEntropy.apply(logits, *of_classes), logits)  # type: ignore[no-untyped-call]
            return _reduced(func(*bound.args, **bound.kwargs), logits)
        return func(*args, **(kwargs or {}))


def _has_class_indices(arguments: dict[str, Any]) -> bool:
    """Whether targets are the indices of classes, which _CrossEntropy takes, and no transformation of torch.func is under way."""
    logits = arguments["input"]
    return (
        not arguments["target"].is_floating_point()
        and arguments["label_smoothing"] == 0
        and arguments["size_average"] is None
        and arguments["reduce"] is None
        and not _functorch.is_transformed()
        and torch.autograd.forward_ad.unpack_dual(logits).tangent is None  # type: ignore[no-untyped-call]
    )


class _CrossEntropy(torch.autograd.Function):
    """The loss of logits whose classes are sharded. What softmax's gradient sums over the classes is known from the targets, so that
    backward needs no communication."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: str,
    ) -> torch.Tensor:
        classes = min(1, logits.ndim - 1)
        log_probabilities = torch.log_softmax(logits, classes)
        loss = functional.nll_loss(
            log_probabilities, target, weight, ignore_index=ignore_index, reduction="none"
        )
        counts = target != ignore_index
        target = torch.where(counts, target, torch.zeros_like(target))
        share = counts.to(loss.dtype) if weight is None else weight[target] * counts
        if reduction != "none":
            loss = loss.sum()
        if reduction == "mean":
            total = share.sum()
            loss, share = loss / total, share / total
        ctx.save_for_backward(log_probabilities, target, counts, share)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # what is saved would say nothing of the logits
            raise RuntimeError(
                "loss_parallel: the gradient of its loss cannot be differentiated again (create_graph=True). Compute the loss outside of "
                "loss_parallel, where distributed targets and weights give the same."
            )
        log_probabilities, target, counts, share = ctx.saved_tensors
        classes = min(1, log_probabilities.ndim - 1)
        share = torch.where(counts, gradient * share, torch.zeros_like(share)).unsqueeze(classes)
        result = torch.exp(log_probabilities).mul_(share)
        return result.scatter_add_(classes, target.unsqueeze(classes), -share), None, None, None, None


def _prepare(arguments: dict[str, Any]) -> None:
    """Checks the logits, and makes distributed tensors of what goes with them."""
    logits = arguments["input"]
    classes = min(1, logits.ndim - 1)
    placements = _C.placements(logits)
    for dim, placement in enumerate(placements):
        if not isinstance(placement, (Shard, Replicate)):
            raise ValueError(
                f"loss_parallel: the logits are placed {placements}, and would have to be moved between ranks along mesh dim {dim} before a loss can be computed. "
                "Redistribute them so that they are sharded or replicated there."
            )
    mesh = _C.device_mesh(logits)
    target = arguments["target"]
    if not _C.is_dtensor(target):
        has_classes = target.is_floating_point()  # they are probabilities
        wanted = (
            placements if has_classes else tuple(_without(placement, classes) for placement in placements)
        )
        if any(
            isinstance(placement, Shard) and not (has_classes and placement.dim == classes)
            for placement in wanted
        ):
            raise ValueError(
                f"loss_parallel: the logits are placed {placements}, so the targets must be distributed, as {wanted}, but they are a plain tensor. "
                "Use distribute_tensor for a tensor of all targets, or DTensor.from_local for this rank's."
            )
        arguments["target"] = DTensor.from_local(target, mesh)
    weight = arguments.get("weight")
    if weight is not None and not _C.is_dtensor(weight):
        arguments["weight"] = DTensor.from_local(weight, mesh)


def _reduced(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The loss, replicated along mesh dims that shard the classes."""
    classes = min(1, logits.ndim - 1)
    pairs = zip(_C.placements(loss), _C.placements(logits), strict=True)
    wanted = [Replicate() if mine.is_partial() and its.is_shard(classes) else mine for mine, its in pairs]
    return _functorch.redistribute(loss, wanted, False, None, None)


def _without(placement: Placement, classes: int) -> Placement:
    """The placement of a tensor of the same samples that has no dim of classes."""
    if not isinstance(placement, Shard) or placement.dim == classes:
        return Replicate()
    return Shard(placement.dim - (placement.dim > classes))
