"""Making, placing and mapping distributed tensors."""

import pytest
import torch
from ranks import Collectives, assert_full, meshes, on_ranks, placements_of, values
from tessera.experimental import implicit_replication, local_map

import tessera
from tessera import DTensor, Partial, Placement, Replicate, Shard


def test_placements_are_values():
    assert Shard(0) == Shard(dim=0) != Shard(1)
    assert len({Shard(0), Shard(0), Replicate(), Partial(), Partial("sum"), Partial("max")}) == 4
    assert repr([Shard(-1), Replicate(), Partial("avg")]) == "[Shard(dim=-1), Replicate(), Partial(avg)]"
    assert [str(p) for p in (Shard(0), Replicate(), Partial())] == ["S(0)", "R", "P(sum)"]
    assert all(isinstance(p, Placement) for p in (Shard(0), Replicate(), Partial()))
    assert isinstance(Shard(0), Shard) and not isinstance(Shard(0), Replicate)
    assert Shard(2).dim == 2 and Partial("min").reduce_op == "min"
    assert (
        Shard(0).is_shard()
        and Shard(0).is_shard(0)
        and not Shard(0).is_shard(1)
        and not Shard(0).is_partial()
    )
    assert Partial().is_partial() and Partial().is_partial("sum") and not Partial().is_partial("max")
    assert Shard(0) != 0 and Shard(0) != "S(0)"
    with pytest.raises(ValueError, match="no reduction 'mode'"):
        Partial("mode")


@on_ranks()
def test_distribute_redistribute_and_gather():
    for mesh in meshes():
        full = values(5, 3)
        for source in placements_of(full, mesh):
            x = tessera.distribute_tensor(full, mesh, source)
            assert x.placements == source and x.device_mesh == mesh
            assert_full(x, full)
            for target in placements_of(full, mesh):
                y = x.redistribute(placements=target)
                assert y.placements == target
                assert_full(y, full)
            assert_full(x.redistribute(mesh, [Replicate()] * mesh.ndim, async_op=True), full)


@on_ranks()
def test_what_the_source_has_counts():
    mesh = tessera.init_device_mesh("cpu", (4,))
    mine = torch.full((4,), float(tessera.get_rank()))
    assert_full(tessera.distribute_tensor(mine, mesh, [Shard(0)]), torch.zeros(4))
    assert_full(tessera.distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=2), torch.full((4,), 2.0))
    assert_full(tessera.distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=None), torch.arange(4.0))
    parameter = tessera.distribute_tensor(torch.nn.Parameter(mine), mesh)
    assert (
        isinstance(parameter, torch.nn.Parameter)
        and parameter.requires_grad
        and parameter.placements == (Replicate(),)
    )


@on_ranks()
def test_from_local_and_back_with_gradients():
    for mesh in meshes():
        local = torch.full((2, 3), float(mesh.get_rank())).requires_grad_()
        x = DTensor.from_local(local, mesh, [Shard(0)] * mesh.ndim)
        assert x.shape == (8, 3)
        assert torch.equal(x.to_local(), local)
        (x * x).sum().backward()
        assert torch.equal(local.grad, 2 * local.detach())
    uneven = torch.ones(3 if tessera.get_rank() < 3 else 1)
    mesh = tessera.init_device_mesh("cpu", (4,))
    assert DTensor.from_local(uneven, mesh, [Shard(0)], run_check=True).shape == (10,)
    assert DTensor.from_local(uneven, mesh, [Shard(0)], shape=(10,), stride=(1,)).full_tensor().shape == (10,)
    with pytest.raises(ValueError):
        DTensor.from_local(torch.ones(3 if tessera.get_rank() != 1 else 2), mesh, [Shard(0)], run_check=True)


@on_ranks()
def test_factories():
    for mesh in meshes():
        for placements in placements_of(torch.empty(5, 3), mesh):
            keywords = {"device_mesh": mesh, "placements": placements}
            assert_full(tessera.zeros(5, 3, **keywords), torch.zeros(5, 3))
            assert_full(
                tessera.ones((5, 3), **keywords, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64)
            )
            assert_full(tessera.full((5, 3), 2.5, **keywords), torch.full((5, 3), 2.5))
            assert_full(tessera.full((5, 3), 7, **keywords), torch.full((5, 3), 7))
            assert tessera.empty([5, 3], **keywords, requires_grad=True).requires_grad
        for placements in placements_of(torch.empty(5, 3), mesh, partial=False):
            uniform = tessera.rand(5, 3, device_mesh=mesh, placements=placements)
            assert uniform.placements == placements and 0 <= uniform.min().item() and uniform.max().item() < 1
            assert uniform.full_tensor().unique().numel() > 10
            assert tessera.randn(
                5, 3, device_mesh=mesh, placements=placements, requires_grad=True
            ).requires_grad
        with mesh:
            assert_full(tessera.ones(4), torch.ones(4))
            assert tessera.ones(4).device_mesh == mesh


@on_ranks()
def test_without_a_mesh_there_is_an_error():
    for make in (
        lambda: tessera.ones(4),
        lambda: tessera.distribute_tensor(values(4)),
        lambda: DTensor.from_local(values(4)),
    ):
        with pytest.raises(RuntimeError, match="mesh"):
            make()


@on_ranks()
def test_bad_arguments_are_errors_of_fitting_types():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(5, 3), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="sequence"):
        x.redistribute(placements=Shard(0))
    with pytest.raises(TypeError, match="placement"):
        x.redistribute(placements=[0])
    with pytest.raises(TypeError, match="placements"):
        x.redistribute()
    with pytest.raises(IndexError):
        x.redistribute(placements=[Shard(2)])
    with pytest.raises(ValueError):
        x.redistribute(placements=[Shard(0), Shard(1)])
    with pytest.raises(RuntimeError, match="distributed already"):
        DTensor.from_local(x, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="gradients"):
        tessera.distribute_tensor(values(3).requires_grad_() * 2, mesh, [Shard(0)])
    with Collectives(mesh) as count, pytest.raises(ValueError, match="redistribute"):
        tessera.distribute_tensor(x, mesh, [Replicate()])
    assert count == 0
    assert tessera.distribute_tensor(x, mesh, [Shard(0)]) is x
    assert tessera.distribute_tensor(x, mesh, [Shard(-2)]) is x
    with pytest.raises(NotImplementedError, match="another mesh"):
        x.redistribute(tessera.init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
    with pytest.raises(ValueError, match="reduced"):
        x.redistribute(placements=[Partial()])._raise_if_contains_partial_placements()


@on_ranks()
def test_implicit_communication_can_be_forbidden():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(4, 4), mesh, [Shard(0)])
    y = tessera.distribute_tensor(values(4, 4), mesh, [Shard(1)])
    assert_full(x + y, 2 * values(4, 4))
    with tessera.implicit_communication("forbidden"):
        with pytest.raises(RuntimeError, match="aten::add.Tensor.*redistribute"):
            x + y
        assert_full(x + x, 2 * values(4, 4))
        with tessera.ExplicitRedistributionContext(enable=False):
            x + y
    with tessera.ExplicitRedistributionContext(), pytest.raises(RuntimeError, match="redistribute"):
        x + y
    x + y
    full = tessera.distribute_tensor(values(4, 4), mesh, [Replicate()])
    with tessera.ExplicitRedistributionContext():
        assert_full(x + full, 2 * values(4, 4))
    with tessera.ExplicitRedistributionContext(strict=True):
        with pytest.raises(RuntimeError, match="redistribute"):
            x + full
        with tessera.ExplicitRedistributionContext(enable=False):
            x + full
        x + x


def test_implicit_communication_can_be_warned_about():
    def main():
        mesh = tessera.init_device_mesh("cpu", (2,))
        x = tessera.distribute_tensor(values(4, 4), mesh, [Shard(0)])
        y = tessera.distribute_tensor(values(4, 4), mesh, [Shard(1)])
        with tessera.implicit_communication("warned"):
            x + y

    with pytest.warns(UserWarning, match="has to be redistributed"):
        tessera.run(2, main)


@on_ranks()
def test_local_map():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(6, 8), mesh, [Shard(1)]).requires_grad_()
    y = tessera.distribute_tensor(values(8, 5), mesh, [Shard(0)])

    @local_map(out_placements=([Partial()], None), in_placements=([Shard(1)], [Shard(0)], None))
    def product(a, b, scale):
        assert not isinstance(a, DTensor)
        return (a @ b) * scale, a.shape[1]

    result, columns = product(x, y, 2.0)
    assert columns == 2 and result.placements == (Partial(),)
    assert_full(result, 2 * values(6, 8) @ values(8, 5), rtol=1e-4, atol=1e-5)
    result.redistribute(placements=[Replicate()]).sum().backward()
    expected = values(6, 8).requires_grad_()
    (2 * expected @ values(8, 5)).sum().backward()
    assert_full(x.grad, expected.grad, rtol=1e-4, atol=1e-5)

    assert product(values(2, 3), values(3, 2), 1.0)[0].shape == (2, 2)  # nothing distributed: as it is
    with pytest.raises(ValueError, match="redistribute_inputs"):
        product(x.redistribute(placements=[Replicate()]), y, 1.0)
    again = local_map(torch.mm, [Partial()], ([Shard(1)], [Shard(0)]), redistribute_inputs=True)
    assert_full(
        again(x.redistribute(placements=[Replicate()]), y), values(6, 8) @ values(8, 5), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="out_placements has 2 entries"):
        local_map(torch.mm, ([Partial()], [Partial()]))(x, y)
    with pytest.raises(AssertionError, match="expects placements"):
        local_map(torch.mm, [Partial()], ([Shard(1)], None))(x, y)


@on_ranks()
def test_implicit_replication_is_undone_by_an_error():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(4), mesh, [Shard(0)])
    with pytest.raises(ZeroDivisionError), implicit_replication():
        assert_full(x + values(4), 2 * values(4))
        1 / 0
    with pytest.raises(ValueError):
        x + values(4)
