"""A process of torch.distributed that dies is known to the others at once."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

WORKER = pathlib.Path(__file__).with_name("fault_worker.py")


def start(how: str, count: int = 3) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, WORKER, how],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    ("how", "code", "named"),
    [
        ("kill", -signal.SIGKILL, "was killed by signal 9"),
        ("raise", 1, "rank 1 failed: ValueError: the disk is full"),
        ("exit", 3, "rank 1 has ended"),
    ],
)
def test_others_hear_of_it(how, code, named):
    processes = start(how)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert processes[1].returncode == code, outputs[1]
    for rank in (0, 2):
        assert processes[rank].returncode == 0, outputs[rank]
        assert named in outputs[rank], outputs[rank]
        assert "rank 1" in outputs[rank]


def restarted(directory: pathlib.Path, how: str) -> dict[int, str]:
    """The totals that training prints, by step; what torchrun's last attempt says counts."""
    worker = WORKER.with_name("restart_worker.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*torchrun, "--max-restarts=1", "--monitor-interval=0.1", worker, directory, how],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("attempt")]
    if how == "killed":
        assert any(line[1] == "1" for line in lines)
        assert min(int(line[3]) for line in lines if line[1] == "1") == 4
    return {int(line[3]): line[5] for line in lines}


def test_torchrun_starts_it_again(tmp_path):
    assert restarted(tmp_path / "a", "killed") == restarted(tmp_path / "b", "undisturbed")
