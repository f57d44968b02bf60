"""Tensors without memory: what is made and distributed on meta gets memory later, each rank for its part."""

import functools

import pytest
import torch
from models import MLP
from ranks import Collectives, assert_full, meshes, on_ranks, placements_of, values
from tessera.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch import nn

import tessera
from tessera import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh


def assert_on_meta(tensor: torch.Tensor, placements: tuple) -> None:
    assert isinstance(tensor, DTensor) and tensor.is_meta and tensor._local_tensor.is_meta
    assert tensor.placements == placements


@on_ranks()
def test_distribute_tensor():
    for mesh in meshes():
        full = torch.empty(5, 3, device="meta", dtype=torch.float64, requires_grad=True)
        for placements in placements_of(full, mesh):
            for source in (0, None):
                x = distribute_tensor(full, mesh, placements, src_data_rank=source)
                assert_on_meta(x, placements)
                assert x.shape == (5, 3) and x.dtype == torch.float64 and x.is_leaf and x.requires_grad
            real = torch.empty_like(x, device="cpu")
            like = distribute_tensor(values(5, 3, dtype=torch.float64), mesh, placements)
            assert real.placements == placements and real._local_tensor.shape == like._local_tensor.shape
            assert real.device.type == "cpu" and real.to_local().nbytes == like.to_local().nbytes
            with torch.no_grad():
                assert_full(real.copy_(like), values(5, 3, dtype=torch.float64))


@on_ranks()
def test_nothing_is_communicated():
    mesh = init_device_mesh("cpu", (4,))
    with Collectives(mesh) as count:
        x = distribute_tensor(torch.empty(5, 4, device="meta"), mesh, [Shard(0)], src_data_rank=None)
        y = (x.redistribute(placements=[Replicate()]) @ x.T).relu().sum(0)
        assert y.is_meta and x.full_tensor().is_meta
    assert count == 0


@on_ranks(2)
def test_ranks_must_agree():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="on meta"):
        distribute_tensor(torch.empty(4, device="meta" if tessera.get_rank() else "cpu"), mesh, [Shard(0)])


@on_ranks()
def test_factories():
    mesh = init_device_mesh("cpu", (4,))
    for make in (tessera.empty, tessera.zeros, tessera.ones, tessera.rand, tessera.randn, tessera.full):
        make = functools.partial(make, (6, 2), *([3.0] if make is tessera.full else []))
        place = {"device_mesh": mesh, "placements": [Shard(0)]}
        assert_on_meta(make(device="meta", **place), (Shard(0),))
        with torch.device("meta"):
            x = make(requires_grad=True, **place)
        assert_on_meta(x, (Shard(0),))
        assert x.requires_grad and x._local_tensor.shape[0] == (2, 2, 2, 0)[mesh.get_rank()]
        assert make(device="cpu", **place).device.type == "cpu"
    with pytest.raises(ValueError, match="on its own devices"):
        tessera.zeros(2, device_mesh=mesh, device="cuda")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = MLP(), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mlp(x))


def initialise(module: nn.Module) -> None:
    tessera.manual_seed(7)
    for each in module.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()


@pytest.mark.parametrize("way", ["replicated", "partitioned", "parallel"])
def test_modules(way):
    """Made on meta, then given memory and initialised: as one that was whole from the start, on one device."""

    def shard(name: str, module: nn.Module, mesh: tessera.DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter, mesh, [Shard(0)])
            module.register_parameter(key, nn.Parameter(placed))

    def alone() -> tuple[list[torch.Tensor], torch.Tensor]:
        block = distribute_module(Block(), init_device_mesh("cpu", (1,)))
        initialise(block)
        output = block(distribute_tensor(values(6, 8), init_device_mesh("cpu", (1,))))
        return [each.full_tensor().detach() for each in block.parameters()], output.full_tensor().detach()

    expected, output = tessera.run(1, alone)[0]

    @on_ranks()
    def test():
        mesh = init_device_mesh("cpu", (4,))
        with torch.device("meta"):
            block = Block()
        if way == "parallel":
            plan = {
                "mlp.up": ColwiseParallel(use_local_output=False),
                "mlp.down": RowwiseParallel(use_local_output=False),
            }
            parallelize_module(block, mesh, plan)
        distribute_module(block, mesh, shard if way == "partitioned" else None)
        assert all(each.is_meta and isinstance(each, DTensor) for each in block.state_dict().values())
        block.to_empty(device="cpu")
        assert not any(each.is_meta for each in block.state_dict().values())
        up = block.mlp.up.weight
        assert up._local_tensor.numel() == up.numel() // (1 if way == "replicated" else 4)
        initialise(block)
        for ours, theirs in zip(block.parameters(), expected, strict=True):
            assert torch.equal(ours.full_tensor(), theirs)
        assert_full(block(distribute_tensor(values(6, 8), mesh)), output, rtol=1e-4, atol=1e-5)

    test()


@on_ranks()
def test_numbers_are_not_drawn_for_what_has_no_memory():
    mesh = init_device_mesh("cpu", (4,))
    tessera.manual_seed(1)
    expected = tessera.randn(6, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    tessera.manual_seed(1)
    x = tessera.randn(6, device_mesh=mesh, placements=[Shard(0)], device="meta")
    nn.init.normal_(x), nn.init.kaiming_uniform_(torch.empty_like(x[:, None])), torch.rand_like(x)
    assert torch.equal(nn.init.normal_(torch.empty_like(x, device="cpu")).full_tensor(), expected)
