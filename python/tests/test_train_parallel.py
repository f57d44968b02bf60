"""What training loops do, on models that were made parallel, against one device."""

import copy
import itertools

import pytest
import torch
from models import MLP, filled
from ranks import on_ranks, values
from tessera.parallel import (
    ColwiseParallel,
    ReplicatedModule,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    replicate,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tessera import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh


class Block(nn.Module):
    """Pre-norm, residual."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), MLP()
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


def make(checkpointed: bool = False) -> nn.Module:
    return filled(nn.Sequential(Block(checkpointed), Block(checkpointed))).double()


def parallel(model: nn.Module, mesh, sequence: bool = False) -> nn.Module:
    """All tensors distributed, along the last mesh dim by layers; gradients reduced once."""
    layout = Shard(1) if sequence else Replicate()
    plan = {
        "*.mlp.up": ColwiseParallel(input_layouts=layout, use_local_output=False),
        "*.mlp.down": RowwiseParallel(output_layouts=layout, use_local_output=False),
    }
    if sequence:
        plan["*.norm"] = SequenceParallel()
    return replicate(distribute_module(parallelize_module(model, mesh, plan), mesh), mesh)


X, Y = values(4, 4, 8).double(), values(4, 4, 8, seed=1).double()


def data(mesh):
    placements = [Shard(0), Replicate()] if mesh.ndim == 2 else [Replicate()]
    return tuple(distribute_tensor(tensor, mesh, placements, src_data_rank=None) for tensor in (X, Y))


def meshes():
    return [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))]


def compare(loop, checkpointed=False, sequence=(False, True), rtol=1e-6, atol=1e-8):
    """The loop, called with a model and data, returns losses: they and the parameters are those of one device."""
    plain = make()
    expected = loop(plain, X, Y)
    for mesh, each in itertools.product(meshes(), sequence):
        model = parallel(make(checkpointed), mesh, each)
        losses = loop(model, *data(mesh))
        assert losses == pytest.approx(expected, rel=rtol)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            torch.testing.assert_close(ours.full_tensor().detach(), theirs.detach(), rtol=rtol, atol=atol)


def steps(model, x, y, optimiser, scheduler=None, count=4):
    losses = []

    def closure():
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(count):
        loss = optimiser.step(closure).item()
        losses.append(loss)
        if scheduler is not None:
            scheduler.step(loss) if isinstance(
                scheduler, lr_scheduler.ReduceLROnPlateau
            ) else scheduler.step()
    return losses


OPTIMISERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.1},
    "LBFGS": {"lr": 0.1, "max_iter": 4},
}


@pytest.mark.parametrize("name", OPTIMISERS)
@on_ranks()
def test_optimisers(name):
    kind = getattr(torch.optim, name)
    compare(
        lambda model, x, y: steps(model, x, y, kind(model.parameters(), **OPTIMISERS[name])), sequence=(True,)
    )


@pytest.mark.parametrize("way", ["foreach", "fused"])
@on_ranks()
def test_optimisers_over_lists(way):
    compare(
        lambda model, x, y: steps(model, x, y, torch.optim.AdamW(model.parameters(), lr=0.01, **{way: True}))
    )


def test_there_are_no_other_optimisers():
    """SparseAdam and Adafactor aside: of sparse gradients, and one whose factors depend on how a matrix lies (tested below). Muon: test_optim.py."""
    known = {*OPTIMISERS, "Optimizer", "SparseAdam", "Adafactor", "Muon"}
    assert {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    } <= known


@on_ranks()
def test_adafactor():
    compare(
        lambda model, x, y: steps(model, x, y, torch.optim.Adafactor(model.parameters(), lr=0.01)),
        sequence=(True,),
    )


SCHEDULERS = {
    "StepLR": lambda optimiser: lr_scheduler.StepLR(optimiser, 2, 0.5),
    "LambdaLR": lambda optimiser: lr_scheduler.LambdaLR(optimiser, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda optimiser: lr_scheduler.CosineAnnealingLR(optimiser, 4),
    "CosineAnnealingWarmRestarts": lambda optimiser: lr_scheduler.CosineAnnealingWarmRestarts(optimiser, 2),
    "OneCycleLR": lambda optimiser: lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=5),
    "CyclicLR": lambda optimiser: lr_scheduler.CyclicLR(optimiser, 0.01, 0.1, step_size_up=2),
    "LinearLR": lambda optimiser: lr_scheduler.LinearLR(optimiser, total_iters=3),
    "PolynomialLR": lambda optimiser: lr_scheduler.PolynomialLR(optimiser, 5),
    "ReduceLROnPlateau": lambda optimiser: lr_scheduler.ReduceLROnPlateau(
        optimiser, patience=0, threshold=0.9
    ),
    "SequentialLR": lambda optimiser: lr_scheduler.SequentialLR(
        optimiser, [lr_scheduler.ConstantLR(optimiser, 0.5), lr_scheduler.ExponentialLR(optimiser, 0.8)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@on_ranks()
def test_schedules(name):
    def loop(model, x, y):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return steps(model, x, y, optimiser, SCHEDULERS[name](optimiser))

    compare(loop, sequence=(False,))


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [False, True])
@on_ranks()
def test_clipping(norm, foreach):
    def loop(model, x, y):
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        norms = []
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm, foreach=foreach).item())
            optimiser.step()
        return norms

    compare(loop)


@on_ranks()
def test_accumulation():
    def loop(model, x, y):
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            optimiser.zero_grad()
            for part in range(2):
                last = part == 1
                if isinstance(model, ReplicatedModule):
                    model.set_requires_gradient_sync(last)
                loss = nn.functional.mse_loss(model(x * (part + 1)), y) / 2
                loss.backward()
                losses.append(loss.item())
            optimiser.step()
        return losses

    compare(loop)


@on_ranks()
def test_activations_computed_again():
    compare(
        lambda model, x, y: steps(model, x, y, torch.optim.AdamW(model.parameters(), lr=0.01)),
        checkpointed=True,
    )


@pytest.mark.parametrize("checkpointed", [False, True])
@on_ranks()
def test_autocast(checkpointed):
    """Matrix products in bfloat16: the same on all ranks, and near one device's, whose sums are rounded elsewhere."""

    def loop(model, x, y):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            optimiser.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x)
                loss = nn.functional.mse_loss(output, y)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses

    plain = make().float()
    assert plain.get_submodule("0.mlp").up.weight.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain[0].mlp(X.float()).dtype == torch.bfloat16
    expected = loop(plain, X.float(), Y.float())
    for mesh in meshes():
        model = parallel(make(checkpointed).float(), mesh)
        x, y = (tensor.float() for tensor in data(mesh))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model[0].mlp(x).dtype == torch.bfloat16
        assert loop(model, x, y) == pytest.approx(expected, rel=2e-2)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor().detach(), theirs.detach(), rtol=5e-2, atol=1e-2)


@on_ranks()
def test_saved_and_loaded():
    """A model and its optimiser go on from their state dicts as they would have."""
    mesh = meshes()[1]
    model = parallel(make(), mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps(model, *data(mesh), optimiser, count=2)
    again = parallel(filled(make().float(), 0.1).double(), mesh)
    again.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(again.parameters(), lr=0.5)
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    assert steps(again, *data(mesh), other, count=2) == pytest.approx(
        steps(model, *data(mesh), optimiser, count=2), rel=1e-9
    )
