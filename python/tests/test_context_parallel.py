"""Attention over a sharded sequence, from Python: as on one device, in each way."""

import pytest
import torch
from ranks import on_ranks, values
from tessera.parallel import (
    ContextParallel,
    context_parallel,
    from_zigzag,
    parallelize_module,
    to_zigzag,
    zigzag_order,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tessera import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from tessera.debug import CommDebugMode

METHODS = ("allgather", "ulysses", "ring")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@on_ranks()
def test_equal_to_one_device(method, zigzag, causal):
    meshes = [
        (init_device_mesh("cpu", (4,)), [Shard(2)], 4),
        (init_device_mesh("cpu", (2, 2)), [Shard(2), Shard(1)], 2),
    ]
    plain = [values(2, 8 if i % 3 == 0 else 4, 13, 8, seed=i) for i in range(4)]
    leaves = [each.clone().requires_grad_() for each in plain[:3]]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    expected.backward(plain[3])
    for mesh, placements, ranks in meshes:
        ordered = [to_zigzag(each, 2, ranks) if zigzag else each for each in plain]
        q, k, v, gradient = (distribute_tensor(each, mesh, placements) for each in ordered)
        for each in (q, k, v):
            each.requires_grad_()
        with context_parallel(method, zigzag=zigzag):
            actual = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        assert actual.placements[0] == Shard(2)
        actual.backward(gradient)
        for ours, theirs in ((actual, expected), *((x.grad, y.grad) for x, y in zip((q, k, v), leaves))):
            full = ours.detach().full_tensor()
            torch.testing.assert_close(
                from_zigzag(full, 2, ranks) if zigzag else full, theirs.detach(), rtol=1e-4, atol=1e-5
            )


@on_ranks()
def test_what_is_sent():
    mesh = init_device_mesh("cpu", (4,))
    q, k, v = (distribute_tensor(values(1, 8, 64, 16, seed=i), mesh, [Shard(2)]) for i in range(3))
    kinds = {"allgather": "all_gather", "ulysses": "alltoall", "ring": "send"}
    for method, kind in kinds.items():
        with context_parallel(method), CommDebugMode() as mode:
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert any(kind in str(each) for each in mode.get_comm_counts()), (method, mode.get_comm_counts())


@on_ranks()
def test_errors_name_what_can():
    mesh = init_device_mesh("cpu", (4,))
    q, k, v = (distribute_tensor(values(1, 2, 8, 8, seed=i), mesh, [Shard(2)]) for i in range(3))
    with context_parallel("ring"), pytest.raises(NotImplementedError, match="dropout.*allgather.*ulysses"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    with context_parallel("ulysses"), pytest.raises(ValueError, match="2 heads.*ring.*allgather"):
        F.scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match='no method "spiral"'), context_parallel("spiral"):
        pass


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.project(x).split(32, dim=-1))
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize("method", METHODS)
@on_ranks()
def test_style(method):
    mesh = init_device_mesh("cpu", (4,))
    for zigzag in (False, True):
        torch.manual_seed(1)
        model, reference = Attention().double(), Attention().double()
        for each, (name, other) in zip(model.parameters(), reference.named_parameters()):
            with torch.no_grad():
                each.copy_(values(*each.shape, seed=len(name)) * 0.2)
                other.copy_(each)
        distribute_module(model, mesh)
        parallelize_module(model, mesh, ContextParallel(method, zigzag=zigzag))
        x = values(2, 13, 32).double()
        expected = reference(x)
        expected.square().sum().backward()
        given = to_zigzag(x, 1, 4) if zigzag else x
        actual = model(distribute_tensor(given, mesh, [Replicate()]))
        assert actual.placements == (Shard(1),)
        actual.square().sum().backward()
        full = actual.detach().full_tensor()
        torch.testing.assert_close(
            from_zigzag(full, 1, 4) if zigzag else full, expected.detach(), rtol=1e-4, atol=1e-5
        )
        for each, other in zip(model.parameters(), reference.parameters()):
            assert isinstance(each.grad, DTensor)
            torch.testing.assert_close(each.grad.full_tensor(), other.grad)
        with pytest.raises(TypeError, match="expected a tensor"):
            model(3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS)
@on_ranks()
def test_computed_again_in_the_way_of_its_forward(method, reentrant):
    mesh = init_device_mesh("cpu", (4,))
    plain = [values(2, 4, 17, 8, seed=i) for i in range(4)]
    leaves = [each.clone().requires_grad_() for each in plain[:3]]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=True)
    expected.backward(plain[3])

    def attend(*tensors):
        return F.scaled_dot_product_attention(*tensors, is_causal=True)

    q, k, v, gradient = (distribute_tensor(to_zigzag(each, 2, 4), mesh, [Shard(2)]) for each in plain)
    for each in (q, k, v):
        each.requires_grad_()
    with context_parallel(method, zigzag=True):
        actual = checkpoint(attend, q, k, v, use_reentrant=reentrant)
    actual.backward(gradient)  # outside of the scope
    for ours, theirs in ((actual, expected), *((x.grad, y.grad) for x, y in zip((q, k, v), leaves))):
        full = from_zigzag(ours.detach().full_tensor(), 2, 4)
        torch.testing.assert_close(full, theirs.detach(), rtol=1e-4, atol=1e-5)


@on_ranks()
def test_computed_again_in_doubt():
    mesh = init_device_mesh("cpu", (4,))
    q, k, v = (
        distribute_tensor(values(2, 4, 19, 8, seed=i), mesh, [Shard(2)]).requires_grad_() for i in range(3)
    )

    def attend(*tensors):
        return F.scaled_dot_product_attention(*tensors, is_causal=True)

    with context_parallel("ring", zigzag=True):
        zigzag = checkpoint(attend, q, k, v, use_reentrant=False)
    with context_parallel("ring"):
        checkpoint(attend, q, k, v, use_reentrant=False)
    with pytest.raises(RuntimeError, match="called again in backward.*different options.*inside"):
        zigzag.sum().backward()
    with context_parallel("ring", zigzag=True):
        zigzag = checkpoint(attend, q, k, v, use_reentrant=False)
        zigzag.sum().backward()
    assert q.grad.placements == (Shard(2),)


def test_zigzag_order():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    x = values(3, 11)
    assert torch.equal(from_zigzag(to_zigzag(x, 1, 4), 1, 4), x)
