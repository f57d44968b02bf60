"""What each process of test_checkpoint.py runs: one of the functions below."""

import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_checkpoint import counted
from torch.distributed import tensor as reference
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh as reference_mesh

import tessera
from tessera import Replicate, Shard, _StridedShard, checkpoint

EMPTY = (0, 3)


def state(owner: str, real: bool) -> dict:
    """On a mesh that depends on the number of ranks; tensors that some ranks have none of, or that nobody has."""
    world = dist.get_world_size()
    shape = (2, world // 2)
    full, small, scalar = counted(7, 5), counted(2, 3), torch.tensor(4.0)
    if not real:
        full, small, scalar = torch.zeros(7, 5), torch.zeros(2, 3), torch.tensor(0.0)
    if owner == "tessera":
        mesh = tessera.init_device_mesh("cpu", shape)
        line = tessera.init_device_mesh("cpu", (world,))

        def make(tensor, mesh, placements):
            return tessera.distribute_tensor(tensor, mesh, placements)

        shard, replicate = Shard, Replicate()
        strided = make(full, mesh, [_StridedShard(0, split_factor=2), Replicate()])
    else:
        mesh, line = reference_mesh("cpu", shape), reference_mesh("cpu", (world,))
        make = reference.distribute_tensor
        shard, replicate = reference.Shard, reference.Replicate()
        strided = make(full, mesh, [shard(0), replicate])
    return {
        "model": {
            "w": make(full, mesh, [shard(0), shard(1)]),
            "twice": make(full, mesh, [shard(0), shard(0)]),
            "strided": strided,
            "replica": make(full, line, [replicate]),
            "small": make(small, line, [shard(0)]),
            "scalar": make(scalar, line, [replicate]),
            "empty": make(torch.zeros(EMPTY), line, [shard(1)]),
            "parameter": torch.nn.Parameter(make(full, line, [shard(1)])),
        },
        "plain": full.clone(),
        "step": 3 if real else 0,
        "list": [make(full, line, [shard(0)]), 5 if real else 0],
    }


def check(found: dict) -> None:
    expected = {"small": counted(2, 3), "scalar": torch.tensor(4.0), "empty": torch.zeros(EMPTY)}
    for name, tensor in found["model"].items():
        assert torch.equal(tensor.detach().full_tensor(), expected.get(name, counted(7, 5))), name
    assert torch.equal(found["plain"], counted(7, 5)) and torch.equal(
        found["list"][0].full_tensor(), counted(7, 5)
    )
    assert found["step"] == 3 and found["list"][1] == 5


def save(saver: str, directory: pathlib.Path) -> None:
    """Each one's tensors by `saver`."""
    for owner in ("tessera", "torch"):
        if saver == "torch":
            dcp.save(state(owner, True), checkpoint_id=directory / owner)
        else:
            for format in ("tessera", "dcp"):
                checkpoint.save(state(owner, True), directory / f"{owner}-{format}", format=format)


def load(saver: str, directory: pathlib.Path) -> None:
    for path in sorted(directory.iterdir()):
        for owner in ("tessera", "torch"):
            found = state(owner, False)
            checkpoint.load(found, path)
            check(found)
            if path.name.endswith("-tessera"):
                continue
            found = state(owner, False)
            dcp.load(found, checkpoint_id=path)
            check(found)
        if path.name.endswith("-tessera"):
            weight = state("tessera", False)["model"]["w"]
            dcp.load({"model.w": weight}, storage_reader=HuggingFaceStorageReader(str(path)))
            assert torch.equal(weight.full_tensor(), counted(7, 5))


def save_optimizer(saver: str, directory: pathlib.Path) -> None:
    mesh = reference_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Linear(6, 5)
    for name, value in (("weight", counted(5, 6)), ("bias", counted(5))):
        setattr(
            model, name, torch.nn.Parameter(reference.distribute_tensor(value, mesh, [reference.Shard(0)]))
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for step in range(2):
        for parameter in model.parameters():
            gradient = counted(*parameter.shape) * (step + 1)
            parameter.grad = reference.distribute_tensor(gradient, mesh, [reference.Shard(0)])
        optimizer.step()
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(plain, checkpoint_id=directory / "plain")
    helpers = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(helpers, checkpoint_id=directory / "helpers")
    expected = {
        name: {
            "value": parameter.detach().full_tensor(),
            "exp_avg": optimizer.state[parameter]["exp_avg"].full_tensor(),
            "exp_avg_sq": optimizer.state[parameter]["exp_avg_sq"].full_tensor(),
        }
        for name, parameter in model.named_parameters()
    }
    if dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")


def alone(saver: str, directory: pathlib.Path) -> None:
    """A process whose group is gone, and that no launcher started, is alone: its ranks save what each has."""
    rank = dist.get_rank()
    checkpoint.save({"ranks": dist.get_world_size()}, directory / "together")
    dist.barrier()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    checkpoint.save({"rank": rank}, directory / f"rank-{rank}")
    assert checkpoint.load_full(directory / f"rank-{rank}") == {"rank": rank}
    assert checkpoint.load_full(directory / "together") == {"ranks": 2}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    what, saver, directory = sys.argv[1:]
    bodies = (save, load, save_optimizer, alone)
    {function.__name__: function for function in bodies}[what](saver, pathlib.Path(directory))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    print("done")
