"""Cross entropy of logits whose classes are sharded, against one device, and without gathering them."""

import contextlib
import itertools
import warnings

import pytest
import torch
from ranks import assert_full, on_ranks, values
from tessera.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch import nn
from torch.nn import functional as F

import tessera
from tessera import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tessera.debug import CommDebugMode

CASES = [
    {"reduction": reduction, "label_smoothing": smoothing, "weight": weight, "ignore_index": ignored}
    for reduction, smoothing, weight, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.2), (False, True), (-100, 3)
    )
]
SHAPES = [(7,), (5, 7), (4, 16), (2, 7, 3), (2, 8, 3, 2)]


def case(shape, weight=False, **options):
    logits = values(*shape)
    classes = min(1, len(shape) - 1)
    count = shape[classes]
    positions = shape[:classes] + shape[classes + 1 :]
    targets = torch.randint(0, count, positions, generator=torch.Generator().manual_seed(2))
    if targets.ndim:
        targets.view(-1)[0] = options["ignore_index"]
    weights = values(count, seed=1).abs() if weight else None
    return logits, targets, weights, classes, options


def target_placement(placement, classes):
    if not placement.is_shard() or placement.dim == classes:
        return Replicate()
    return Shard(placement.dim - (placement.dim > classes))


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks()
def test_equal_to_one_device(shape):
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for options in CASES:
        logits, targets, weights, classes, rest = case(shape, **options)
        plain = logits.clone().requires_grad_()
        expected = F.cross_entropy(plain, targets, weights, **rest)
        upstream = values(*expected.shape, seed=5)
        expected.backward(upstream)
        for mesh in meshes:
            others = [Replicate(), Shard(0), Shard(len(shape) - 1)] if mesh.ndim == 2 else [None]
            for other in others:
                placements = [Shard(classes)] if other is None else [other, Shard(classes)]
                ours = distribute_tensor(logits, mesh, placements).requires_grad_()
                placed = distribute_tensor(
                    targets, mesh, [target_placement(each, classes) for each in placements]
                )
                with loss_parallel():
                    loss = F.cross_entropy(ours, placed, weights, **rest)
                    loss.backward(distribute_tensor(upstream, mesh))
                assert_full(loss, expected.detach(), rtol=1e-5, atol=1e-5)
                assert_full(ours.grad, plain.grad, rtol=1e-4, atol=1e-5)
                assert ours.grad.placements == ours.placements


@on_ranks()
def test_logits_are_not_moved():
    """Of all that is communicated, as the first rank is warned, nothing is as large as the logits."""
    mesh = init_device_mesh("cpu", (4,))
    logits = distribute_tensor(values(3, 4096), mesh, [Shard(1)]).requires_grad_()
    targets = distribute_tensor(torch.tensor([5, 4095, 2000]), mesh)
    is_first = mesh.get_rank() == 0
    with contextlib.ExitStack() as stack:
        if is_first:
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.enter_context(tessera.implicit_communication("warned"))
        for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"weight": values(4096).abs()}):
            with loss_parallel():
                F.cross_entropy(logits, targets, **options).backward()
            assert logits.grad.placements == (Shard(1),)
    if is_first:
        moved = [str(each.message).splitlines()[0] for each in caught if "redistribute" in str(each.message)]
        assert moved and not any("4096" in text for text in moved), moved


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@on_ranks()
def test_backward_needs_no_communication(reduction):
    mesh = init_device_mesh("cpu", (4,))
    logits = distribute_tensor(values(5, 8), mesh, [Shard(1)]).requires_grad_()
    targets, weights = torch.tensor([1, 7, 0, 3, 3]), values(8, seed=1).abs()
    with loss_parallel(), CommDebugMode() as mode:
        loss = F.cross_entropy(logits, targets, weights, reduction=reduction)
        assert mode.get_comm_counts() == {torch.ops.c10d_functional.all_reduce: 3}
        with mode:
            loss.sum().backward()
        assert mode.get_total_counts() == 0
        with pytest.raises(RuntimeError, match="differentiated again"):
            loss = F.cross_entropy(logits, targets, reduction=reduction).sum()
            torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@on_ranks()
def test_targets_that_are_all_ignored(reduction):
    mesh = init_device_mesh("cpu", (4,))
    plain = values(5, 8).requires_grad_()
    logits = distribute_tensor(values(5, 8), mesh, [Shard(1)]).requires_grad_()
    targets = torch.full((5,), -100)
    expected = F.cross_entropy(plain, targets, reduction=reduction)
    expected.sum().backward()
    with loss_parallel():
        loss = F.cross_entropy(logits, targets, reduction=reduction)
        loss.sum().backward()
    torch.testing.assert_close(loss.full_tensor(), expected.detach(), equal_nan=True)
    assert_full(logits.grad, plain.grad)


@on_ranks()
def test_plain_targets_and_weights():
    mesh = init_device_mesh("cpu", (4,))
    logits, targets, weights = values(5, 8), torch.tensor([1, 7, 0, 3, 3]), values(8, seed=1).abs()
    sharded = distribute_tensor(logits, mesh, [Shard(1)])
    with loss_parallel():
        assert_full(nn.CrossEntropyLoss(weights)(sharded, targets), F.cross_entropy(logits, targets, weights))
        probabilities = logits.softmax(1)
        assert_full(F.cross_entropy(sharded, probabilities), F.cross_entropy(logits, probabilities))
        torch.testing.assert_close(
            F.cross_entropy(logits, targets), F.cross_entropy(logits, targets, reduction="mean")
        )  # all plain
    with pytest.raises(ValueError, match="plain tensor"):
        F.cross_entropy(sharded, targets)
    two = init_device_mesh("cpu", (2, 2))
    with (
        loss_parallel(),
        pytest.raises(
            ValueError, match=r"the targets must be distributed, as \(Shard\(dim=0\), Replicate\(\)\)"
        ),
    ):
        F.cross_entropy(distribute_tensor(logits, two, [Shard(0), Shard(1)]), targets)


@on_ranks()
def test_logits_that_would_be_moved_are_refused():
    mesh = init_device_mesh("cpu", (4,))
    targets = torch.tensor([1, 7, 0, 3, 3])
    for placement in (Partial(), tessera._StridedShard(1, split_factor=2)):
        with (
            loss_parallel(),
            pytest.raises(ValueError, match="would have to be moved between ranks along mesh dim 0"),
        ):
            F.cross_entropy(distribute_tensor(values(5, 8), mesh, [placement]), targets)


@on_ranks()
def test_behind_a_layer_of_cut_classes():
    mesh = init_device_mesh("cpu", (4,))
    plain, head = nn.Linear(6, 12), nn.Linear(6, 12)
    with torch.no_grad():
        for layer in (plain, head):
            layer.weight.copy_(values(12, 6)), layer.bias.copy_(values(12))
    parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    x, targets = values(2, 5, 6), torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(0))
    with loss_parallel():
        loss = F.cross_entropy(head(x).flatten(0, 1), targets.flatten())
        loss.backward()
    expected = F.cross_entropy(plain(x).flatten(0, 1), targets.flatten())
    expected.backward()
    assert_full(loss, expected)
    assert_full(head.weight.grad, plain.weight.grad)
    assert isinstance(loss, DTensor) and head.weight.grad.placements == (Shard(0),)
