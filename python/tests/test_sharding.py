"""Sharding rules of one's own."""

import pytest
import torch
from ranks import assert_full, on_ranks, values
from tessera.experimental import register_sharding

import tessera
from tessera import Partial, Replicate, Shard


@torch.library.custom_op("tessera_test::row_sums", mutates_args=())
def row_sums(x: torch.Tensor, factor: torch.Tensor, power: int) -> torch.Tensor:
    return (x**power).sum(1) * factor


@row_sums.register_fake
def _(x, factor, power):
    return x.new_empty(x.shape[0])


@on_ranks()
def test_another_librarys_operator_runs_on_replicas_without_a_rule():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = tessera.distribute_tensor(values(6, 5), mesh, [Shard(0)])
    factor = tessera.distribute_tensor(values(6), mesh, [Shard(0)])
    assert_full(row_sums(x, factor, 2), row_sums(values(6, 5), values(6), 2))


def test_a_rule_of_ones_own():
    seen = []

    @register_sharding(torch.ops.tessera_test.row_sums.default)
    def rule(x, factor, power):
        seen.append((x.shape, x.ndim, factor.shape, power))
        return [([Shard(0)], [Shard(0), Shard(0), None]), ([Partial()], [Shard(1), Replicate(), None])]

    @on_ranks()
    def check():
        mesh = tessera.init_device_mesh("cpu", (2, 2))
        with tessera.implicit_communication("forbidden"):
            x = tessera.distribute_tensor(values(6, 5), mesh, [Shard(0), Shard(1)])
            factor = tessera.distribute_tensor(values(6), mesh, [Shard(0), Replicate()])
            result = row_sums(x, factor, 2)
        assert result.placements == (Shard(0), Partial())
        assert_full(result, row_sums(values(6, 5), values(6), 2))

    check()
    assert seen[0] == ((6, 5), 2, (6,), 2)


def test_a_rule_that_makes_no_sense_is_an_error():
    with pytest.raises(TypeError, match="operator"):
        register_sharding("aten::mm")(lambda: [])

    @register_sharding(torch.ops.tessera_test.row_sums.default)
    def rule(x, factor, power):
        return [([Shard(0)], [Shard(0)])]

    def main():
        mesh = tessera.init_device_mesh("cpu", (2,))
        x = tessera.distribute_tensor(values(6, 5), mesh, [Shard(0)])
        row_sums(x, x[:, 0], 2)

    with pytest.raises(ValueError, match="placements of 1 tensors, but the call has 2"):
        tessera.run(2, main)
