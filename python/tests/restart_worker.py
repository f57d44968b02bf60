"""What torchrun runs in test_faults.py: training that is killed in its first attempt, and goes on in the second."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import tessera
from tessera import Replicate, Shard

STEPS = 8


def main(directory: str, is_killed: bool) -> None:
    # torch itself would find the addresses of the first attempt in torchrun's store.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore("attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh = tessera.init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"weight": tessera.distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]), "step": 0}
    if path := tessera.checkpoint.latest(directory):
        tessera.checkpoint.load(state, path)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    for step in range(state["step"], STEPS):
        if is_killed and attempt == "0" and step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = state["weight"].sum().redistribute(placements=[Replicate()]).to_local()
        state["weight"] = state["weight"] * 1.1 + total * 0.01
        state["step"] = step + 1
        if dist.get_rank() == 0:
            print(f"attempt {attempt} step {step} total {total.item():.6f}", flush=True)
        if step % 2 == 1:
            tessera.checkpoint.save(state, f"{directory}/step-{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "killed")
