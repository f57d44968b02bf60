"""What dispatch costs from Python: the operators of dispatch.cpp, on plain tensors, on Tessera's and on those of torch.distributed.tensor.

Prints a table. With --torch FILE, also writes what it costs in torch.distributed.tensor into a file, for bench_dispatch: a line for each
operator, name, tab, overhead in us. The ranks are of torch's fake backend, so nothing is communicated.
"""

import argparse
import logging
import statistics
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import tessera as ours

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def microseconds(calls, count=200, batches=9):
    """How long each of the calls takes: the best of some batches, in which they take turns."""
    least = [float("inf")] * len(calls)
    for call in calls:
        for _ in range(50):
            call()
    for _ in range(batches):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(count):
                call()
            least[number] = min(least[number], (time.perf_counter() - start) / count * 1e6)
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


def distributed(module, mesh, placements, *shape):
    return module.DTensor.from_local(torch.ones(*shape), mesh, placements, run_check=False)


def tensors_of(module, mesh):
    return [
        distributed(module, mesh, [module.Shard(0)], 8, 8),
        distributed(module, mesh, [module.Shard(0)], 8, 8),
        distributed(module, mesh, [module.Replicate()], 8, 8),
    ]


def parameters_of(module, mesh):
    return (
        distributed(module, mesh, [module.Replicate()], 8, 8),
        distributed(module, mesh, [module.Shard(0)], 8, 8).detach().requires_grad_(),
        distributed(module, mesh, [module.Shard(0)], 8).detach().requires_grad_(),
    )


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--torch", metavar="FILE", help="where to write what torch.distributed.tensor costs"
    )
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    meshes = [(module, module.init_device_mesh("cpu", (2,))) for module in (ours, theirs)]

    tensors = [[torch.ones(8, 8) for _ in range(3)], *(tensors_of(*each) for each in meshes)]
    rows = []
    print("dispatch from Python, us over plain torch")
    print(f"{'':20}{'plain':>10}{'Tessera':>10}{'torch':>10}{'ratio':>8}")

    def row(name, calls):
        plain, mine, reference = microseconds(calls)
        rows.append((name, mine - plain, reference - plain))
        print(
            f"{name:20}{plain:10.2f}{'+%.2f' % (mine - plain):>10}{'+%.2f' % (reference - plain):>10}{(reference - plain) / max(mine - plain, 0.01):7.0f}x",
            flush=True,
        )

    with torch.no_grad():
        for name, call in OPERATIONS.items():
            row(name, [lambda t=t: call(t) for t in tensors])
    print(
        f"{'median':30}{f'+{statistics.median(r[1] for r in rows):.2f}':>10}{f'+{statistics.median(r[2] for r in rows):.2f}':>10}{statistics.median(r[2] / max(r[1], 0.01) for r in rows):7.0f}x"
    )
    plain = (torch.ones(8, 8), torch.ones(8, 8, requires_grad=True), torch.ones(8, requires_grad=True))
    row(
        "linear+relu fw+bw",
        [lambda p=p: train(*p) for p in (plain, *(parameters_of(*each) for each in meshes))],
    )
    if options.torch:
        with open(options.torch, "w") as file:
            file.writelines(f"{name}\t{reference:.3f}\n" for name, _, reference in rows)


if __name__ == "__main__":
    main()
