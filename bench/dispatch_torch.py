"""What dispatch costs in PyTorch's own DTensor: the operators of dispatch.cpp on the fake backend, a line each: name, tab, overhead in us."""

import logging
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def microseconds(call, count=300, batches=7):
    for _ in range(50):
        call()
    least = float("inf")
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(count):
            call()
        least = min(least, (time.perf_counter() - start) / count * 1e6)
    return least


def train(x, w, b):
    torch.relu(torch.nn.functional.linear(x, w, b)).sum().backward()


OPERATIONS = {
    "add": lambda t: torch.add(t[0], t[1]),
    "mul scalar": lambda t: torch.mul(t[0], 2),
    "relu": lambda t: torch.relu(t[0]),
    "mm": lambda t: torch.mm(t[0], t[2]),
    "addmm": lambda t: torch.addmm(t[1], t[0], t[2]),
    "t": lambda t: t[0].t(),
    "view": lambda t: t[0].view(t[0].shape),
    "sum": lambda t: t[0].sum(),
    "sum dim": lambda t: t[0].sum(1),
    "detach": lambda t: t[0].detach(),
    "clone": lambda t: t[0].clone(),
    "copy_": lambda t: t[1].copy_(t[0]),
    "add_": lambda t: t[1].add_(t[0]),
    "empty_like": lambda t: torch.empty_like(t[0]),
}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def distributed(placement, *shape):
        return DTensor.from_local(torch.ones(*shape), mesh, [placement], run_check=False)

    plain = [torch.ones(8, 8) for _ in range(3)]
    tensors = [distributed(Shard(0), 8, 8), distributed(Shard(0), 8, 8), distributed(Replicate(), 8, 8)]
    with torch.no_grad():
        for name, call in OPERATIONS.items():
            print(f"{name}\t{microseconds(lambda: call(tensors)) - microseconds(lambda: call(plain)):.3f}", flush=True)

    x, w, b = torch.ones(8, 8), torch.ones(8, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    base = microseconds(lambda: train(x, w, b))
    dx = distributed(Replicate(), 8, 8)
    dw = distributed(Shard(0), 8, 8).detach().requires_grad_()
    db = distributed(Shard(0), 8).detach().requires_grad_()
    print(f"linear+relu fw+bw\t{microseconds(lambda: train(dx, dw, db)) - base:.3f}")


if __name__ == "__main__":
    main()
