"""Partial values that stay partial through an operator: nothing is communicated, and the values are those of one device."""

import pytest
import torch
from ranks import assert_full, on_ranks, values
from tessera.experimental import implicit_replication
from torch.nn import functional as F

import tessera
from tessera import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tessera.debug import CommDebugMode

aten = torch.ops.aten
ALL = ("sum", "avg", "max", "min")
LINEAR = ("sum", "avg")
EXTREMES = ("max", "min")
INDEX = torch.tensor([2, 0])
UPPER = values(4, 4, seed=9).triu() + 3 * torch.eye(4)
LU, PIVOTS = torch.linalg.lu_factor(values(4, 4, seed=8))
QR = torch.geqrf(values(4, 4, seed=7))

# A function, the reductions that stay, how many of its first arguments are partial.
CASES = {
    "complex": (lambda x, y: torch.complex(x, y[0, 0]), LINEAR, 2),
    "index_select": (lambda x: x.index_select(0, INDEX), ALL, 1),
    "gather": (lambda x: x.gather(1, torch.tensor([[3], [0], [1], [2]])), ALL, 1),
    "index_copy": (lambda x, y: x.index_copy(0, INDEX, y[:2]), ALL, 2),
    "index_fill": (lambda x: x.index_fill(0, INDEX, 0.5), ("avg", "max", "min"), 1),
    "index_fill with a tensor": (lambda x, y: x.index_fill(1, INDEX, y[0, 0]), ALL, 2),
    "scatter": (lambda x, y: x.scatter(0, torch.tensor([[1, 0, 3, 2]]), y[:1]), ALL, 2),
    "scatter of a number": (lambda x: x.scatter(0, torch.tensor([[1, 0]]), 0.5), ("avg", "max", "min"), 1),
    "select_backward": (lambda x: aten.select_backward(x, [4, 3, 4], 1, 2), ALL, 1),
    "slice_backward": (lambda x: aten.slice_backward(x, [9, 4], 0, 1, 8, 2), ALL, 1),
    "pad with zeros": (lambda x: F.pad(x, (1, 2)), ALL, 1),
    "pad with a number": (lambda x: F.pad(x, (1, 0, 2, 1), value=0.3), ("avg", "max", "min"), 1),
    "channel_shuffle": (lambda x: F.channel_shuffle(x.view(1, 4, 4), 2), ALL, 1),
    "solve_triangular": (lambda x: torch.linalg.solve_triangular(UPPER, x, upper=True), LINEAR, 1),
    "cholesky_solve": (lambda x: torch.cholesky_solve(x, UPPER, upper=True), LINEAR, 1),
    "solve": (lambda x: torch.linalg.solve(UPPER, x), LINEAR, 1),
    "solve of a vector": (lambda x: torch.linalg.solve(UPPER, x[0]), LINEAR, 1),
    "lu_solve": (lambda x: torch.linalg.lu_solve(LU, PIVOTS, x), LINEAR, 1),
    "ormqr": (lambda x: torch.ormqr(*QR, x), LINEAR, 1),
    "glu_backward": (lambda x: aten.glu_backward(x, values(4, 8, seed=5), 1), LINEAR, 1),
    "mse_loss_backward": (lambda x, y: aten.mse_loss_backward(torch.tensor(2.0), x, y, 1), LINEAR, 2),
    "rrelu_backward": (
        lambda x: aten.rrelu_with_noise_backward(x, values(4, 4, seed=5), values(4, 4).abs(), 0.1, 0.3, False, False),
        LINEAR,
        1,
    ),
    "float to double": (lambda x: x.double(), ALL, 1),
    "float to half": (lambda x: x.half(), EXTREMES, 1),
    "rsub": (lambda x, y: torch.rsub(x, y), LINEAR, 2),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-3.0, 0.0, 4.0])), ("max",), 1),
}  # fmt: skip


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(parts)
    return {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]


@pytest.mark.parametrize("name", CASES)
@on_ranks()
def test_it_stays(name):
    function, ops, count = CASES[name]
    mesh = init_device_mesh("cpu", (4,))
    for op in ops:
        parts = [[10 * values(4, 4, seed=10 * i + rank) for rank in range(4)] for i in range(count)]
        placed = [DTensor.from_local(held[tessera.get_rank()], mesh, [Partial(op)]) for held in parts]
        with CommDebugMode() as mode, implicit_replication():
            result = function(*placed)
        assert mode.get_total_counts() == 0 and result.placements == (Partial(op),), (op, result.placements)
        expected = function(*(reduced(held, op) for held in parts))
        assert_full(result, expected, rtol=2e-3 if expected.dtype == torch.half else 1e-4, atol=1e-4)


@on_ranks()
def test_an_extreme_becomes_the_other():
    mesh = init_device_mesh("cpu", (4,))
    held = [values(4, 3, seed=rank) for rank in range(4)]
    x = DTensor.from_local(held[tessera.get_rank()], mesh, [Partial("max")])
    highest = torch.stack(held).amax(0)
    for alpha, becomes in ((1, "min"), (-2, "max")):
        result = torch.rsub(x, 3.0, alpha=alpha)
        assert result.placements == (Partial(becomes),)
        assert_full(result, torch.rsub(highest, 3.0, alpha=alpha))
    y = distribute_tensor(values(4, 3, seed=7), mesh)
    result = torch.rsub(y, x)
    assert result.placements == (Partial("max"),)
    assert_full(result, torch.rsub(values(4, 3, seed=7), highest))


@on_ranks()
def test_casts_that_lose_something_are_of_whole_values():
    mesh = init_device_mesh("cpu", (4,))
    held = [values(4, 3, seed=rank) for rank in range(4)]
    for dtype, ops in ((torch.int32, ALL), (torch.uint8, ALL), (torch.bool, ALL), (torch.half, LINEAR)):
        for op in ops:
            x = DTensor.from_local(held[tessera.get_rank()], mesh, [Partial(op)])
            result = x.to(dtype)
            assert result.placements == (Replicate(),), (dtype, op)
            assert_full(result, reduced(held, op).to(dtype))
    wraps = DTensor.from_local(torch.tensor([100 * (tessera.get_rank() == 0) + 200]), mesh, [Partial("max")])
    assert wraps.to(torch.int8).full_tensor().item() == torch.tensor(300).to(torch.int8)


@on_ranks()
def test_bucketize_of_sharded_boundaries():
    mesh = init_device_mesh("cpu", (4,))
    for count in (8, 5, 2):
        boundaries = values(count).sort()[0]
        x = torch.cat([values(6, seed=1), torch.tensor([float("nan"), -9.0, 9.0])])
        placed = distribute_tensor(x, mesh), distribute_tensor(boundaries, mesh, [Shard(0)])
        with CommDebugMode() as mode:
            result = torch.bucketize(*placed)
        assert result.placements == (Partial(),) and mode.get_total_counts() == 0
        assert_full(result, torch.bucketize(x, boundaries))


@on_ranks()
def test_what_cannot_stay_partial_is_replicated():
    """As in PyTorch: what to_local() gives does not depend on which collective is the cheapest."""
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(values(8, 4, seed=tessera.get_rank()), mesh, [Partial()])
    full = sum(values(8, 4, seed=rank) for rank in range(4))
    sharded = distribute_tensor(values(8, 4, seed=9), mesh, [Shard(0)])
    for function in (torch.relu, lambda t: t + 1, lambda t: F.layer_norm(t, (4,))):
        result = function(x)
        assert result.placements == (Replicate(),)
        torch.testing.assert_close(result.to_local(), function(full))
    with CommDebugMode() as mode:
        result = x * sharded + sharded  # where another tensor is sharded, a reduce-scatter is enough
    assert result.placements == (Shard(0),) and mode.get_total_counts() == 1
    assert mode.get_comm_counts()[torch.ops.c10d_functional.reduce_scatter_tensor] == 1
    assert_full(result, full * values(8, 4, seed=9) + values(8, 4, seed=9), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
@on_ranks()
def test_extremes_of_integers_stay_partial(dtype):
    mesh = init_device_mesh("cpu", (4,))
    local = torch.tensor([[3, 1], [2, 5]], dtype=dtype) + tessera.get_rank()
    for op, whole in (("max", torch.tensor([[6, 4], [5, 8]])), ("min", torch.tensor([[3, 1], [2, 5]]))):
        x = DTensor.from_local(local, mesh, [Partial(op)])
        for function in (getattr(torch, op), getattr(torch, f"a{op}")):
            with CommDebugMode() as mode:
                result = function(x)
            assert mode.get_total_counts() == 0 and result.placements == (Partial(op),)
            assert_full(result, function(whole.to(dtype)))
