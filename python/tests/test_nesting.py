"""Neither torch.distributed nor we wrap a distributed tensor of the other's."""

import pathlib
import sys

if sys.argv[1:] == ["torch"]:  # whichever is imported first
    import torch.distributed.tensor

import pytest
import torch
import torch.distributed as dist
from ranks import values
from test_processes import launch

import tessera
from tessera import Replicate, Shard, distribute_module


def nothing_nests() -> None:
    from torch.distributed import tensor as reference
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo")
    ours, theirs = tessera.init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
    x = tessera.distribute_tensor(values(4, 4), ours, [Shard(0)])
    for refused in (
        lambda: reference.distribute_tensor(x, theirs, [reference.Shard(0)]),
        lambda: reference.DTensor.from_local(x, theirs, [reference.Shard(0)]),
        lambda: reference.distribute_module(distribute_module(torch.nn.Linear(4, 4), ours), theirs),
    ):
        with pytest.raises(TypeError, match="tessera.to_torch"):
            refused()
    for wrap in (
        lambda module: fully_shard(module, mesh=theirs),
        FullyShardedDataParallel,
        torch.nn.parallel.DistributedDataParallel,
    ):
        with pytest.raises(TypeError, match=r"cannot take .* Use tessera\.parallel\."):
            wrap(torch.nn.Sequential(distribute_module(torch.nn.Linear(4, 4), ours)))
    fully_shard(torch.nn.Linear(4, 4), mesh=theirs)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    other = reference.distribute_tensor(values(4, 4), theirs, [reference.Shard(0)])
    for refused in (
        lambda: tessera.distribute_tensor(other, ours, [Shard(0)]),
        lambda: tessera.DTensor.from_local(other, ours, [Replicate()]),
    ):
        with pytest.raises(TypeError, match="tessera.from_torch"):
            refused()


@pytest.mark.parametrize("first", ["torch", "tessera"])
def test_nothing_nests(first):
    for output in launch(2, first, worker=pathlib.Path(__file__)):
        assert output.strip().endswith("done"), output


if __name__ == "__main__":
    nothing_nests()
    print("done")
