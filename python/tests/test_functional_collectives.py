"""torch.distributed._functional_collectives on our meshes, on ranks that are threads and on processes; torch's FSDP2 does not nest."""

import pathlib
import sys

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from ranks import assert_full, values
from tessera.experimental import local_map
from test_processes import launch

import tessera
from tessera import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh


def of_all(size: int, *shape: int) -> list[torch.Tensor]:
    """What each rank holds."""
    return [values(*shape, seed=rank) for rank in range(size)]


def on_a_mesh_of_one_dim() -> None:
    size = tessera.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    me, inputs = mesh.get_local_rank(), of_all(size, 2 * size, 3)
    for group in (mesh, (mesh, 0), mesh.get_group(), mesh["tp"]):
        x = inputs[me]
        stacked = torch.stack(inputs)
        for name, expected in {
            "sum": stacked.sum(0),
            "avg": stacked.mean(0),
            "max": stacked.amax(0),
            "min": stacked.amin(0),
            "product": stacked.prod(0),
        }.items():
            if name != "avg" or tessera._C.is_rank_thread():  # gloo has no average
                torch.testing.assert_close(collectives.all_reduce(x, name, group) + 0, expected)
        assert torch.equal(x, inputs[me])
        assert torch.equal(collectives.all_gather_single(x, 0, group) + 0, torch.cat(inputs))
        assert torch.equal(collectives.all_gather_single(x, 1, group) + 0, torch.cat(inputs, 1))
        scattered = collectives.reduce_scatter_single(x, "sum", 0, group) + 0
        torch.testing.assert_close(scattered, stacked.sum(0).chunk(size)[me])
        turned = torch.stack([each.t() for each in inputs]).sum(0).chunk(size, 1)[me]
        torch.testing.assert_close(collectives.reduce_scatter_single(x.t(), "sum", 1, group) + 0, turned)
        exchanged = collectives.all_to_all_single(x, None, None, group) + 0
        assert torch.equal(exchanged, torch.cat([each.chunk(size)[me] for each in inputs]))
        assert torch.equal(collectives.broadcast(x, 1, group) + 0, inputs[1])
        around = [(rank + 1) % size for rank in range(size)]
        shifted = collectives.permute_tensor(x.flatten(), around, group) + 0
        assert torch.equal(shifted, inputs[(me - 1) % size].flatten())
        pair = [x, 2 * x]
        for results, expected in (
            (collectives.all_reduce_coalesced(pair, "sum", group), stacked.sum(0)),
            (collectives.all_gather_single_coalesced(pair, group), torch.cat(inputs)),
            (
                collectives.reduce_scatter_single_coalesced(pair, "sum", [0, 0], group),
                stacked.sum(0).chunk(size)[me],
            ),
        ):
            torch.testing.assert_close(results[0] + 0, expected)
            torch.testing.assert_close(results[1] + 0, 2 * expected)


def gradients() -> None:
    """Each rank's loss weighs what it gets; the gradient of the sum of all losses, as torch defines it."""
    size = tessera.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    me, inputs = mesh.get_local_rank(), of_all(size, 2 * size)

    def weights(rank: int, count: int) -> torch.Tensor:
        return values(count, seed=10 + rank)

    everything = torch.cat(inputs).requires_grad_()
    parts = everything.chunk(size)
    for call, reference in (
        (lambda x: collectives.all_reduce(x, "sum", mesh), lambda rank: sum(parts)),
        (lambda x: collectives.all_gather_single(x, 0, mesh), lambda rank: torch.cat(parts)),
        (
            lambda x: collectives.reduce_scatter_single(x, "sum", 0, mesh),
            lambda rank: sum(parts).chunk(size)[rank],
        ),
        (
            lambda x: collectives.all_to_all_single(x, None, None, mesh),
            lambda rank: torch.cat([each.chunk(size)[rank] for each in parts]),
        ),
    ):
        x = inputs[me].clone().requires_grad_()
        result = call(x)
        (result * weights(me, result.numel())).sum().backward()
        everything.grad = None
        sum((reference(rank) * weights(rank, result.numel())).sum() for rank in range(size)).backward()
        torch.testing.assert_close(x.grad, everything.grad.chunk(size)[me])


def along_a_dim() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.tensor([float(tessera.get_rank())])
    dp, tp = mesh.get_coordinate()
    assert (collectives.all_reduce(x, "sum", (mesh, 0)) + 0).item() == tp + (2 + tp)
    assert (collectives.all_reduce(x, "sum", (mesh, 1)) + 0).item() == 2 * dp + (2 * dp + 1)
    assert (collectives.all_reduce(x, "sum", mesh["tp"]) + 0).item() == 4 * dp + 1
    with pytest.raises(AssertionError, match="along one mesh dim"):
        collectives.all_reduce(x, "sum", mesh)


def in_local_map() -> None:
    """The example in torch's docstring of local_map."""
    device_mesh = init_device_mesh("cpu", (tessera.get_world_size(),))

    def mm_allreduce_forward(device_mesh, W, X):
        partial_sum_tensor = torch.mm(W, X)
        reduced_tensor = collectives.all_reduce(partial_sum_tensor, "sum", device_mesh)
        return reduced_tensor

    W, X = values(12, 8, seed=1), values(8, 16, seed=2)
    row_wise, col_wise = [Shard(0)], [Shard(1)]
    for in_placements in ([col_wise, row_wise], [None, col_wise, row_wise]):
        local_mm_allreduce_forward = local_map(
            mm_allreduce_forward,
            out_placements=[Replicate()],
            in_placements=in_placements,
            device_mesh=device_mesh,
        )
        W_dt = distribute_tensor(W, device_mesh, col_wise).requires_grad_()
        X_dt = distribute_tensor(X, device_mesh, row_wise)
        Y_dt = local_mm_allreduce_forward(device_mesh, W_dt, X_dt)
        assert_full(Y_dt, W @ X)
    # What is pending is waited for, with its gradient.
    x = values(4, seed=tessera.get_rank()).requires_grad_()
    DTensor.from_local(
        collectives.all_reduce(x, "sum", device_mesh), device_mesh, [Partial()]
    ).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4,), float(tessera.get_world_size())))


PROGRAMS = [on_a_mesh_of_one_dim, gradients, along_a_dim, in_local_map]


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_threads(program):
    tessera.run(4, program, timeout=60)


def test_on_processes():
    for output in launch(4, worker=pathlib.Path(__file__)):
        assert output.strip().endswith("done")


def test_lists_of_ranks_are_refused_on_threads():
    def main():
        with pytest.raises(ValueError, match="give a mesh"):
            collectives.all_reduce(torch.ones(1), "sum", [0, 1])

    tessera.run(2, main)


def test_every_run_has_groups_of_its_own():
    def main():
        mesh = init_device_mesh("cpu", (2,))
        return (collectives.all_reduce(torch.ones(1), "sum", mesh) + 0).item()

    for _ in range(5):
        assert tessera.run(2, main) == [2.0, 2.0]


if __name__ == "__main__":
    for program in PROGRAMS:
        program()
    sys.stdout.write("done\n")
