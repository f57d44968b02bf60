"""Makes the files beside it, which torch 2.13 wrote, again: `python make.py` in this directory."""

import os
import shutil

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

WORLD_SIZE = 2


def save_dcp(rank: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29613", RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE)
    )
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    state = {
        "model": {
            "weight": distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.arange(6).reshape(2, 3), mesh, [Shard(1)]),
            "row": distribute_tensor(torch.tensor([[7, 8]], dtype=torch.uint8), mesh, [Shard(0)]),
        },
        "optim": {
            "step": torch.tensor(3.0),
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "fused": None}],
        },
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "unsigned": torch.tensor([65535], dtype=torch.uint16),
        "empty": torch.empty(0, 3),
        "name": "é",
        "bytes": b"\x00\xff",
    }
    dcp.save(state, checkpoint_id="dcp")
    dist.destroy_process_group()


if __name__ == "__main__":
    shutil.rmtree("dcp", ignore_errors=True)
    mp.spawn(save_dcp, nprocs=WORLD_SIZE)
    numbers = torch.arange(12.0).reshape(3, 4)
    torch.save(numbers, "whole.pt")
    torch.save(numbers[1:], "rows.pt")
    torch.save(numbers.t(), "transposed.pt")
    torch.save(torch.tensor([1 + 2j]).conj(), "conjugated.pt")
    torch.save((1, numbers), "tensor_in_tuple.pt")
    torch.save({"a": np.ones(1)}, "numpy.pt")
    torch.save([None, True, -129, 2**40, 0.5, "é", b"\x00\xff", (1, [2]), {"k": b""}], "values.pt")
    torch.save(2**70, "large.pt")
