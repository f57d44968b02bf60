"""What an optimiser's step and gradient clipping cost over 1,000 parameters: on plain tensors, on Tessera's and on those of torch.distributed.tensor.

The ranks are of torch's fake backend, so that nothing is communicated: what is measured is the cost of getting there.
"""

import logging
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import tessera as ours

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

COUNT = 1000


def milliseconds(call, batches=5):
    call()
    least = float("inf")
    for _ in range(batches):
        start = time.perf_counter()
        call()
        least = min(least, (time.perf_counter() - start) * 1e3)
    return least


def parameters_of(module):
    if module is None:
        return [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(COUNT)]
    mesh = module.init_device_mesh("cpu", (2,))
    made = []
    for number in range(COUNT):
        placement = module.Shard(0) if number % 2 else module.Replicate()
        made.append(
            torch.nn.Parameter(
                module.DTensor.from_local(torch.ones(8, 8), mesh, [placement], run_check=False)
            )
        )
    return made


def main():
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    print(f"{COUNT} parameters of 8 x 8, half of them sharded, ms")
    print(f"{'':28}{'plain':>10}{'Tessera':>10}{'':>8}{'torch':>10}")
    sets = {
        name: parameters_of(module) for name, module in (("plain", None), ("ours", ours), ("theirs", theirs))
    }
    for parameters in sets.values():
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

    def row(name, make):
        times = []
        for _which, parameters in sets.items():
            try:
                times.append(milliseconds(make(parameters)))
            except Exception as error:
                times.append(f"refused ({type(error).__name__})")
        plain, mine, reference = times
        other = reference if isinstance(reference, str) else f"{reference:10.2f} {reference / plain:6.1f}x"
        print(f"{name:28}{plain:10.2f}{mine:10.2f}{mine / plain:7.1f}x{other}", flush=True)

    row("AdamW step, for-loop", lambda p: torch.optim.AdamW(p, foreach=False).step)
    row("AdamW step, foreach", lambda p: torch.optim.AdamW(p, foreach=True).step)
    row("AdamW step, fused", lambda p: torch.optim.AdamW(p, fused=True).step)
    row("clip_grad_norm_, for-loop", lambda p: lambda: torch.nn.utils.clip_grad_norm_(p, 1.0, foreach=False))
    row("clip_grad_norm_, foreach", lambda p: lambda: torch.nn.utils.clip_grad_norm_(p, 1.0, foreach=True))


if __name__ == "__main__":
    main()
