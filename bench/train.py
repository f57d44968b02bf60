"""A step of training the GPT of train.cpp from Python, on two ranks: Tessera on threads and on gloo, torch.distributed.tensor and FSDP2 on gloo, and one device.

The program is the same for both libraries: the styles of their `parallel` modules where tensors are sharded, data by placement where the batch is, fully_shard. (PyTorch's has
no rule for attention on CPUs, so there it is computed on local tensors.) Prints tokens a second. With --torch FILE, also writes those of
torch into a file, for bench_train: lines of "small dp=1,tp=2", a tab, and tokens a second.
"""

import argparse
import dataclasses
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.parallel
from torch import nn
from torch.nn import functional

import tessera

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


@dataclasses.dataclass
class Setup:
    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int
    batch: int
    steps: int  # that are measured together


SETUPS = {
    "small": Setup(vocabulary=96, context=64, width=128, heads=4, layers=2, batch=8, steps=20),
    "medium": Setup(vocabulary=512, context=128, width=512, heads=8, layers=4, batch=4, steps=2),
}
MESHES = {"dp=1,tp=2": "tp", "dp=2,tp=1": "dp", "fsdp=2": "fsdp"}
LIBRARIES = {"tessera": tessera, "torch": torch.distributed.tensor}


class Block(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        width = setup.width
        self.size = width // setup.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        # Queries, keys and values of a head lie side by side. There are as many heads as this rank has.
        qkv = self.qkv(self.norm1(x))
        query, key, value = (
            part.transpose(1, 2) for part in qkv.view(*qkv.shape[:2], -1, 3, self.size).unbind(3)
        )
        x = x + self.projection(attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def attend(query, key, value):
    theirs = isinstance(query, torch.distributed.tensor.DTensor)
    given = [tensor.to_local() for tensor in (query, key, value)] if theirs else (query, key, value)
    result = functional.scaled_dot_product_attention(*given, is_causal=True)
    return (
        torch.distributed.tensor.DTensor.from_local(result, query.device_mesh, query.placements)
        if theirs
        else result
    )


class GPT(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.tokens = nn.Embedding(setup.vocabulary, setup.width)
        self.positions = nn.Parameter(torch.randn(setup.context, setup.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(setup) for _ in range(setup.layers)))
        self.norm = nn.LayerNorm(setup.width)
        self.head = nn.Linear(setup.width, setup.vocabulary, bias=False)

    def forward(self, text):
        return self.head(self.norm(self.blocks(self.tokens(text) + self.positions)))


def text_of(setup: Setup) -> torch.Tensor:
    return torch.randint(
        0, setup.vocabulary, (setup.batch, setup.context + 1), generator=torch.Generator().manual_seed(0)
    )


def step_of(model: nn.Module, text: torch.Tensor, after_backward=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = text[:, :-1], text[:, 1:].flatten()

    def step():
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        after_backward()
        optimizer.step()

    return step


def parallel_step(setup: Setup, name: str, what: str):
    """On this rank, with one of the libraries: what is parallel are tensors ("tp"), or data ("dp"), perhaps with sharded parameters ("fsdp")."""
    library = LIBRARIES[name]
    parallel = library.parallel
    mesh = library.init_device_mesh("cpu", (2,))
    model = GPT(setup)
    if what == "tp":
        plan = {
            "tokens": parallel.RowwiseParallel(input_layouts=library.Replicate()),
            "blocks.*.qkv": parallel.ColwiseParallel(),
            "blocks.*.projection": parallel.RowwiseParallel(),
            "blocks.*.up": parallel.ColwiseParallel(),
            "blocks.*.down": parallel.RowwiseParallel(),
            "head": parallel.ColwiseParallel(use_local_output=False),
        }
        parallel.parallelize_module(model, mesh, plan)
        step = step_of(model, text_of(setup))

        def with_cut_classes():
            with parallel.loss_parallel():
                step()

        return with_cut_classes
    if what == "fsdp":
        fully_shard = parallel.fully_shard if name == "tessera" else torch.distributed.fsdp.fully_shard
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return step_of(model, text_of(setup).chunk(2)[mesh.get_local_rank()])
    library.distribute_module(model, mesh)
    text = library.distribute_tensor(text_of(setup), mesh, [library.Shard(0)])
    if name == "tessera":
        return step_of(parallel.replicate(model, mesh), text)

    def reduce_once():
        for parameter in model.parameters():
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    return step_of(model, text, reduce_once)


def speed(setup: Setup, step, rounds: int) -> float:
    """Tokens a second: the median of some rounds."""
    for _ in range(2):
        step()
    speeds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(setup.steps):
            step()
        speeds.append(setup.steps * setup.batch * setup.context / (time.perf_counter() - start))
    return statistics.median(speeds)


def on_threads(setup: Setup, what: str, rounds: int) -> float:
    return tessera.run(
        2, lambda: speed(setup, parallel_step(setup, "tessera", what), rounds), threads_per_rank=1
    )[0]


def on_gloo(size: str, name: str, what: str, rounds: int) -> float:
    """By processes of this program."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "--rounds", str(rounds), "--worker", size, name, what]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    workers = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"bench/train.py: a process of {size} {name} {what} failed.")
    return float(outputs[0])


def worker(size: str, name: str, what: str, rounds: int) -> None:
    dist.init_process_group("gloo")
    print(speed(SETUPS[size], parallel_step(SETUPS[size], name, what), rounds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", metavar="FILE", help="where to write the tokens a second of torch")
    parser.add_argument("--rounds", type=int, default=3, help="measurements, of which the median counts")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        return worker(*arguments.worker, arguments.rounds)
    print(
        "Training a GPT from Python: tokens a second on two ranks with a core each, and how many times those of torch on gloo"
    )
    print(f"{'':20}{'one device':>12}{'Tessera, threads':>24}{'Tessera, gloo':>24}{'torch, gloo':>14}")
    lines = []
    for size, setup in SETUPS.items():
        alone = speed(setup, step_of(GPT(setup), text_of(setup)), arguments.rounds)
        for mesh, what in MESHES.items():
            threads = on_threads(setup, what, arguments.rounds)
            ours, theirs = (on_gloo(size, name, what, arguments.rounds) for name in ("tessera", "torch"))
            columns = "".join(f"{each:16.0f}{each / theirs:7.1f}x" for each in (threads, ours))
            print(f"{size + ' ' + mesh:20}{alone:12.0f}{columns}{theirs:14.0f}", flush=True)
            lines.append(f"{size} {mesh}\t{theirs:.0f}\n")
    if arguments.torch:
        with open(arguments.torch, "w") as file:
            file.writelines(lines)


if __name__ == "__main__":
    main()
