"""Random numbers do not depend on the mesh or the placement, and nothing about them is communicated."""

import io

import pytest
import torch
import torch.nn.functional as F
from ranks import meshes, on_ranks, placements_of, values
from torch.utils.checkpoint import checkpoint

import tessera
from tessera import Partial, Replicate, Shard


def unsharded(tensor):
    return tensor.full_tensor() if isinstance(tensor, tessera.DTensor) else tensor


def on_one_rank(function):
    """What the function gives on a mesh of one rank; it gets (mesh, placements)."""

    def main():
        tessera.manual_seed(7)
        return unsharded(function(tessera.init_device_mesh("cpu", (1,)), [Replicate()]))

    return tessera.run(1, main)[0]


def expect_the_same_everywhere(function, shape, partial=True, exact=True):
    expected = on_one_rank(function)

    def main():
        for mesh in meshes():
            for placements in placements_of(torch.empty(shape), mesh, partial):
                tessera.manual_seed(7, mesh)
                found = unsharded(function(mesh, placements))
                assert (
                    torch.equal(found, expected) if exact else torch.allclose(found, expected, atol=1e-6)
                ), (mesh, placements)

    tessera.run(4, main)


def placed(shape):
    """A function of a tensor as one of a mesh and placements."""
    return lambda function: (
        lambda mesh, placements: function(tessera.distribute_tensor(values(*shape), mesh, placements))
    )


FUNCTIONS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x, 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(0), 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 10),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.abs()),
    "multinomial": lambda x: torch.multinomial(x.abs(), 2),
    "poisson": lambda x: torch.poisson(x.abs() * 5),
    "with a generator": lambda x: torch.rand_like(x, generator=torch.Generator().manual_seed(3)),
    "two in a row": lambda x: F.dropout(x, 0.5) + torch.rand_like(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    expect_the_same_everywhere(placed((5, 6))(FUNCTIONS[name]), (5, 6))


INIT = {
    "xavier_uniform_": torch.nn.init.xavier_uniform_,
    "xavier_normal_": torch.nn.init.xavier_normal_,
    "kaiming_uniform_": torch.nn.init.kaiming_uniform_,
    "kaiming_normal_": torch.nn.init.kaiming_normal_,
    "orthogonal_": torch.nn.init.orthogonal_,
    "trunc_normal_": torch.nn.init.trunc_normal_,
    "sparse_": lambda x: torch.nn.init.sparse_(x, 0.5),
    "uniform_": torch.nn.init.uniform_,
    "normal_": torch.nn.init.normal_,
}


@pytest.mark.parametrize("name", INIT)
def test_initialisation(name):
    def make(mesh, placements):
        weight = torch.nn.Parameter(tessera.empty(6, 4, device_mesh=mesh, placements=placements))
        INIT[name](weight)
        assert weight.placements == tuple(placements)
        return weight.detach()

    expect_the_same_everywhere(make, (6, 4), partial=False, exact=name != "orthogonal_")


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_attention(p):
    def attend(mesh, placements):
        query = tessera.distribute_tensor(values(2, 4, 5, 8), mesh, placements)
        return F.scaled_dot_product_attention(query, query, query, dropout_p=p)

    expected = on_one_rank(attend)

    def main():
        mesh = tessera.init_device_mesh("cpu", (4,))
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            tessera.manual_seed(7, mesh)
            torch.testing.assert_close(unsharded(attend(mesh, [placement])), expected)

    tessera.run(4, main)


def test_factories_are_the_plain_ones():
    def main():
        for mesh in meshes():
            for placements in placements_of(torch.empty(5, 3), mesh):
                keywords = {"device_mesh": mesh, "placements": placements}
                tessera.manual_seed(1)
                found = [
                    tessera.rand(5, 3, **keywords),
                    tessera.randn((5, 3), **keywords, dtype=torch.float64),
                ]
                tessera.manual_seed(1)
                expected = [tessera.random.rand(5, 3), tessera.random.randn(5, 3, dtype=torch.float64)]
                assert all(map(torch.equal, map(unsharded, found), expected))
                assert found[0].placements == placements
        tessera.manual_seed(2)
        return tessera.random.randint(0, 9, (4,)), tessera.random.randperm(9)

    for integers, permutation in tessera.run(4, main):
        assert integers.dtype == torch.int64 and integers.max() < 9
        assert torch.equal(permutation.sort().values, torch.arange(9))


@on_ranks()
def test_dropout_and_its_gradient_agree():
    mesh = tessera.init_device_mesh("cpu", (4,))
    masks = []
    for placement in (Replicate(), Shard(0), Shard(1), Partial()):
        tessera.manual_seed(5)
        x = tessera.distribute_tensor(torch.ones(6, 8), mesh, [placement]).requires_grad_()
        with tessera.implicit_communication("forbidden"):
            y = F.dropout(x, 0.5)
        y.sum().backward()
        assert torch.equal(unsharded(y.detach()), unsharded(x.grad))
        masks.append(unsharded(y.detach()))
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert 0 < (masks[0] == 0).sum() < 48


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_draws_the_same_numbers(reentrant):
    def gradient(recompute):
        mesh = tessera.init_device_mesh("cpu", (4,))
        tessera.manual_seed(3)
        weight = tessera.distribute_tensor(values(8, 8), mesh, [Shard(1)]).requires_grad_()
        x = tessera.distribute_tensor(values(6, 8, seed=1), mesh, [Shard(0)]).requires_grad_()

        def layer(y):
            return F.dropout(torch.relu(F.dropout(y, 0.5) @ weight), 0.5)

        y = x
        for _ in range(2):
            y = checkpoint(layer, y, use_reentrant=reentrant) if recompute else layer(y)
        y = F.dropout(y, 0.5)
        y.sum().backward()
        return unsharded(weight.grad), unsharded(x.grad), tessera.random.get_rng_state().tolist()

    for recomputed, kept in zip(tessera.run(4, gradient, True), tessera.run(4, gradient, False)):
        torch.testing.assert_close(recomputed[:2], kept[:2])
        assert recomputed[2] == kept[2]


@on_ranks()
def test_states():
    mesh = tessera.init_device_mesh("cpu", (4,))
    tessera.manual_seed(4)
    before = tessera.random.get_rng_state()
    first = unsharded(tessera.rand(5, device_mesh=mesh, placements=[Shard(0)]))
    second = unsharded(tessera.rand(5, device_mesh=mesh, placements=[Shard(0)]))
    with tessera.random.replay(before):
        assert torch.equal(tessera.random.rand(5), first)
    third = unsharded(tessera.rand(5, device_mesh=mesh))
    file = io.BytesIO()
    torch.save(before, file)
    file.seek(0)
    tessera.random.set_rng_state(torch.load(file))
    assert [unsharded(tessera.rand(5, device_mesh=mesh)).tolist() for _ in range(3)] == [
        first.tolist(),
        second.tolist(),
        third.tolist(),
    ]
    with pytest.raises(ValueError, match="state of a random generator"):
        tessera.random.set_rng_state(torch.zeros(3, dtype=torch.uint8))
    with tessera.random.stream(1):
        other = tessera.random.rand(5)
    with tessera.random.stream(1):
        assert torch.equal(tessera.random.rand(5), other)
    assert not torch.equal(other, first)
    # As torch's own functions have them.
    torch.manual_seed(4)
    assert torch.equal(unsharded(tessera.rand(5, device_mesh=mesh)), first)
    with torch.random.fork_rng(devices=[]):
        assert torch.equal(unsharded(tessera.rand(5, device_mesh=mesh)), second)
    assert torch.equal(unsharded(tessera.rand(5, device_mesh=mesh)), second)
    tessera.manual_seed(-1)
    assert tessera.random.is_rng_supported_mesh(mesh)


def test_numbers_of_each_rank_are_the_same_in_each_run():
    def main():
        tessera.manual_seed(6)
        return torch.randn(4, generator=tessera.random.generator()).tolist()

    first, second = tessera.run(4, main), tessera.run(4, main)
    assert first == second
    assert len({tuple(numbers) for numbers in first}) == 4


def test_the_seed_of_torch_is_where_ranks_begin():
    def main():
        return tessera.random.rand(3).tolist()

    torch.manual_seed(11)
    first = tessera.run(2, main)
    torch.rand(5)
    torch.manual_seed(11)
    assert tessera.run(2, main) == first and first[0] == first[1]
    torch.manual_seed(12)
    assert tessera.run(2, main) != first


@on_ranks()
def test_plain_functions_of_torch_are_not_disturbed():
    mesh = tessera.init_device_mesh("cpu", (4,))
    state = torch.get_rng_state()
    x = tessera.rand(8, device_mesh=mesh, placements=[Shard(0)]).normal_()
    F.dropout(x, 0.5)
    torch.multinomial(x.abs(), 3)
    torch.poisson(x.abs())
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks()
def test_ranks_that_differ_are_named():
    mesh = tessera.init_device_mesh("cpu", (4,))
    tessera.manual_seed(1 if tessera.get_rank() == 3 else 2)
    with pytest.raises(RuntimeError, match="rank 3 at seed 1"):
        tessera.random.check_agreement(mesh)
    stages = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))
    tessera.manual_seed(10 + stages.get_local_rank("stage"), stages["tp"])
    tessera.random.check_agreement(stages["tp"])


@on_ranks()
def test_what_one_rank_refuses_to_draw_with_all_refuse():
    """Each rank has a row; that of the last is refused."""
    mesh = tessera.init_device_mesh("cpu", (4,))

    def rows(value):
        plain = torch.full((4, 3), 0.5)
        plain[3] = value
        return tessera.distribute_tensor(plain, mesh, [Shard(0)])

    for draw in (
        lambda: torch.multinomial(rows(0.0), 2),
        lambda: torch.bernoulli(rows(1.5)),
        lambda: torch.empty_like(rows(0.0)).bernoulli_(rows(1.5)),
        lambda: torch.normal(0.0, rows(-1.0)),
        lambda: torch.normal(rows(0.0), rows(-1.0)),
    ):
        with pytest.raises(RuntimeError, match="must|refuses"):
            draw()
    # And all go on.
    assert torch.multinomial(rows(0.5), 2).shape == (4, 2)


@on_ranks()
def test_integers_between_bounds_are_refused_for_complex_numbers_as_by_one_device():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(torch.zeros(4, dtype=torch.complex64), mesh, [Shard(0)])
    for draw in (lambda: torch.randint_like(x, 5), lambda: x.random_(0, 5)):
        with pytest.raises(RuntimeError) as caught:
            draw()
        assert caught.type is RuntimeError
    with pytest.raises(NotImplementedError):
        x.random_()
