"""Operators that once were refused or wrong, each against one device."""

from collections.abc import Callable

import pytest
import torch
from ranks import assert_whole, meshes, on_ranks, placements_of, values

import tessera
from tessera import Replicate, Shard

Function = Callable[[torch.Tensor], torch.Tensor]


def check_everywhere(function: Function, tensor: torch.Tensor, partial: bool = True) -> None:
    """It gives on every placement what it gives on one device."""
    expected = function(tensor)
    for mesh in meshes():
        for placements in placements_of(tensor, mesh, partial):
            distributed = tessera.distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            assert_whole(function(distributed.redistribute(placements=placements)), expected)



@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.masked.mean(x, dim=0),
        lambda x: torch.masked.var(x, dim=1),
        lambda x: torch.masked.std(x, dim=0, keepdim=True),
    ],
)
@on_ranks()
def test_masked_reductions_count_what_they_reduce(function: Function) -> None:
    check_everywhere(function, values(5, 3))


@on_ranks()
def test_unravel_index() -> None:
    check_everywhere(lambda x: torch.stack(torch.unravel_index(x, (3, 4))), torch.tensor([0, 11, 5, 7, 3]), partial=False)


@on_ranks()
def test_bags_of_equal_size() -> None:
    weight, index = values(5, 3), torch.tensor([[0, 4], [2, 2], [1, 3]])
    expected = torch.nn.functional.embedding_bag(index, weight)
    for mesh in meshes():
        indices = tessera.distribute_tensor(index, mesh, [Shard(0)] * mesh.ndim)
        for placements in placements_of(weight, mesh, partial=False):
            assert_whole(torch.nn.functional.embedding_bag(indices, tessera.distribute_tensor(weight, mesh, placements)), expected)


@on_ranks()
def test_fractional_pooling_draws_the_same_on_all_ranks() -> None:
    image = values(2, 3, 9, 9)
    for mesh in meshes():
        x = tessera.distribute_tensor(image, mesh, [Shard(0)] * mesh.ndim)
        pooled, indices = torch.nn.functional.fractional_max_pool2d(x, 2, output_size=4, return_indices=True)
        whole = indices.full_tensor()
        assert whole.shape == (2, 3, 4, 4)
        assert_whole(pooled, image.flatten(2).gather(2, whole.flatten(2)).reshape(2, 3, 4, 4))
        first = tessera.distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim)
        assert torch.equal(first.full_tensor(), whole)


@on_ranks()
def test_low_rank_approximations() -> None:
    matrix = values(9, 2) @ values(2, 6, seed=1)
    for mesh in meshes():
        u, s, v = torch.svd_lowrank(tessera.distribute_tensor(matrix, mesh, [Shard(0)] * mesh.ndim), q=2)
        assert_whole(u @ torch.diag(s) @ v.T, matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_was_replaced_is_still_compiled_by_torchscript() -> None:
    script = torch.jit.script(torch.nn.EmbeddingBag(5, 3))
    assert script(torch.tensor([[0, 1]])).shape == (1, 3)
    pool = torch.jit.script(torch.nn.FractionalMaxPool2d(2, output_size=2))
    assert pool(torch.rand(1, 1, 4, 4)).shape == (1, 1, 2, 2)
