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
