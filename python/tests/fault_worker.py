"""What each process of test_faults.py runs."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import tessera
from tessera import Replicate, Shard


def reduce_for_ever(mesh, strike):
    x = tessera.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    for step in range(1_000_000):
        if step == 3 and dist.get_rank() == 1:
            strike()
        x.sum().redistribute(placements=[Replicate()]).to_local()


def main(how: str) -> None:
    dist.init_process_group("gloo")
    mesh = tessera.init_device_mesh("cpu", (dist.get_world_size(),))

    def raise_error():
        raise ValueError("the disk is full")

    strikes = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "raise": raise_error,
        "exit": lambda: sys.exit(3),
    }
    try:
        reduce_for_ever(mesh, strikes[how])
    except RuntimeError as error:
        print(f"<<{time.monotonic()} {error}>>", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
