"""The backend "shm" of torch.distributed: processes that share memory."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from test_processes import free_port, launch

WORKER = pathlib.Path(__file__).with_name("shm_worker.py")


@pytest.mark.parametrize("backend", ["cpu:shm", "shm"])
@pytest.mark.parametrize("what", ["collectives", "training"])
def test_plain_torch(what, backend):
    for output in launch(3, what, backend, worker=WORKER):
        assert output.strip().endswith("done")


def test_a_killed_process_is_named():
    environment = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "kill", "cpu:shm"],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert processes[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert processes[rank].returncode == 0, outputs[rank]
        assert "rank 1 (process " in outputs[rank], outputs[rank]
        assert "was killed by signal 9" in outputs[rank], outputs[rank]
