"""torch.distributed.checkpoint on four gloo processes: the state that bench_checkpoint saves and loads, on a disk and in memory.

Prints seconds; with --torch FILE, also writes them into a file for bench_checkpoint: lines of "disk save", a tab, and seconds.
"""

import argparse
import os
import shutil
import socket
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

RANKS = 4
TENSORS = 64
REPEATS = 3


def rank_main(rank: int, port: int, mebibytes: int, directory: str, results) -> None:
    warnings.filterwarnings("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = (mebibytes << 20) // TENSORS // 4 // 1024
    state = {
        f"w{i}": distribute_tensor(torch.full((rows, 1024), 1.5), mesh, [Shard(0)]) for i in range(TENSORS)
    }
    seconds = {}
    for what, call in {"save": dcp.save, "load": dcp.load}.items():
        for _ in range(REPEATS):
            dist.barrier()
            start = time.perf_counter()
            call(state, checkpoint_id=directory)
            dist.barrier()
            seconds[what] = min(seconds.get(what, 1e9), time.perf_counter() - start)
    if rank == 0:
        results.update(seconds)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="on the disk to measure")
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--torch", help="the file to write")
    options = parser.parse_args()
    os.makedirs(options.directory, exist_ok=True)
    lines = []
    for place, parent in {"disk": options.directory, "memory": "/dev/shm"}.items():
        directory = tempfile.mkdtemp(prefix="dcp_", dir=parent)
        results = mp.Manager().dict()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(rank_main, (port, options.mebibytes, directory, results), nprocs=RANKS)
        shutil.rmtree(directory)
        for what, seconds in results.items():
            print(f"torch DCP {what} of {options.mebibytes} MiB, {place}: {seconds:.3f} s")
            lines.append(f"{place} {what}\t{seconds:.6f}\n")
    if options.torch:
        with open(options.torch, "w") as file:
            file.writelines(lines)


if __name__ == "__main__":
    main()
