"""Ranks that are processes of torch.distributed."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

WORKER = pathlib.Path(__file__).with_name("process_worker.py")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(world_size: int, *arguments: str, worker: pathlib.Path = WORKER) -> list[str]:
    ports = {"MASTER_PORT": free_port(), "SECOND_PORT": free_port()}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), *arguments],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": "1",  # as torchrun does: ranks share the cores
                **ports,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs)):
        assert process.returncode == 0, f"rank {rank}:\n{output}"
    return outputs


@pytest.mark.parametrize(
    "what", ["tensors", "training", "bridge", "initialise", "sub_groups", "parallel_training"]
)
def test_two_processes(what):
    for output in launch(2, what):
        assert output.strip().endswith("done")


@pytest.mark.parametrize("ranks, what", [(2, "initialise"), (4, "parallel_training")])
def test_torchrun(ranks, what):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        free_port(),
        str(WORKER),
        what,
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.count("done") == ranks, result.stdout


@pytest.mark.parametrize("what", ["sub_groups", "meshes"])
def test_four_processes(what):
    for output in launch(4, what):
        assert output.strip().endswith("done")


def test_ranks_that_are_not_there():
    """Of the backend "fake", whose store need not work."""
    script = """
import torch, tessera
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tessera import Replicate, Shard
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
mesh = tessera.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
x = tessera.DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0), Replicate()])
assert x.shape == (12, 4) and (x @ x.T).shape == (12, 12) and mesh.get_coordinate() == (0, 1)
assert x.redistribute(placements=[Replicate(), Shard(1)]).to_local().shape == (12, 2)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
