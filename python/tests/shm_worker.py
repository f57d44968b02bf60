"""What each process of test_shm.py runs: plain torch programs on the backend "shm", which importing tessera makes known."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import tessera


def collectives(backend):
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 5000, 300_001):
        x = torch.full((count,), float(rank))
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((count,), size * (size - 1) / 2))
        parts = [torch.empty(count) for _ in range(size)]
        dist.all_gather(parts, torch.full((count,), float(rank)))
        assert [part[-1].item() for part in parts] == list(range(size))
        work = dist.broadcast(x := torch.full((count,), float(rank)), src=size - 1, async_op=True)
        work.wait()
        assert x[0] == size - 1
        out = torch.empty(count, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(out, torch.ones(size * count, dtype=torch.bfloat16))
        assert torch.all(out == size)
    there, back = torch.full((1000,), float(rank)), torch.empty(1000)
    operations = [
        dist.P2POp(dist.isend, there, (rank + 1) % size),
        dist.P2POp(dist.irecv, back, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert back[0] == (rank - 1) % size
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(size)]
    pair = dist.new_group([0, 1])
    if rank < 2:
        x = torch.ones(3)
        dist.all_reduce(x, group=pair)
        assert torch.equal(x, torch.full((3,), 2.0))
    dist.barrier()


def training(backend):
    dist.init_process_group(backend)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    parallel = torch.nn.parallel.DistributedDataParallel(plain)
    x = torch.randn(4 * dist.get_world_size(), 6)
    loss = parallel(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    plain(x).square().mean().backward()
    for gradient, parameter in zip(gradients, plain.parameters()):
        torch.testing.assert_close(gradient, parameter.grad)
    # Distributed tensors, in the same groups.
    mesh = tessera.init_device_mesh("cpu", (dist.get_world_size(),))
    assert mesh.get_group() is dist.group.WORLD
    full = torch.arange(40.0).view(8, 5)
    y = tessera.distribute_tensor(full, mesh, [tessera.Shard(0)])
    assert torch.equal((y @ y.T).full_tensor(), full @ full.T)
    other = torch.ones(3)
    if dist.get_rank() == 1:
        other = torch.ones(4)
    try:
        dist.all_reduce(other)
    except RuntimeError as error:
        assert "rank 0 called all_reduce(sum, Float[3])" in str(error), error
        assert "rank 1 called all_reduce(sum, Float[4])" in str(error), error
    else:
        raise AssertionError("no error")


def kill(backend):
    dist.init_process_group(backend)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print(error)
        assert time.monotonic() - start < 60
        os._exit(0)
    os._exit(1)


globals()[sys.argv[1]](sys.argv[2])
if dist.is_initialized():
    dist.destroy_process_group()
print("done")
