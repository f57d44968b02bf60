"""What each process of test_pipelining.py runs."""

import torch
import torch.distributed as dist
from ranks import values
from tessera.parallel import replicate
from tessera.pipelining import PipelineStage, ScheduleGPipe
from test_pipelining import SCHEDULES, assert_gradients, make_schedule, make_stages, mse, one_device
from torch import nn

import tessera
from tessera import Shard


def main():
    dist.init_process_group("gloo")
    x, y = values(8, 6), values(8, 6, seed=1)
    _, gradients = one_device(x, y)
    mesh = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    batch, targets = (tessera.distribute_tensor(tensor, mesh["dp"], [Shard(0)]) for tensor in (x, y))
    for name in SCHEDULES:
        stages = make_stages(
            name,
            mesh["pp"],
            lambda part: replicate(tessera.distribute_module(part, mesh["dp"]), mesh["dp"]),
        )
        make_schedule(name, stages, 2).step(batch, target=targets)
        assert_gradients(stages, gradients)
    # On a process group, as in PyTorch: all ranks, by default.
    for group in (dist.group.WORLD, None):
        linear = nn.Linear(6, 6)
        stage = PipelineStage(linear, dist.get_rank(), 4, torch.device("cpu"), group=group)
        ScheduleGPipe(stage, 2, loss_fn=mse).step(x, target=y)
        assert linear.weight.grad.isfinite().all()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    dist.barrier()
    dist.destroy_process_group()
    print("done")
