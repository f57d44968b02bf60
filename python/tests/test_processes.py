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
                **ports,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
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


def test_four_processes():
    for output in launch(4, "sub_groups"):
        assert output.strip().endswith("done")
