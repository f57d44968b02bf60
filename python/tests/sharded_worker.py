"""What each process of test_sharded.py runs."""

import copy
import os
import pickle
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ranks import values
from torch.distributed import rpc
from torch.distributed import tensor as reference
from torch.distributed._shard import sharded_tensor as torchs
from torch.distributed._shard import sharding_spec as torch_specs
from torch.distributed.device_mesh import init_device_mesh as reference_mesh

import tessera
from tessera import checkpoint, sharded
from tessera.sharded import ChunkShardingSpec, Shard, ShardedTensor, _shard_tensor, sharded_tensor


def chunks(dim, *ranks):
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def assert_sharded(tensor, expected):
    assert type(tensor) is ShardedTensor
    for shard in tensor.local_shards():
        part = expected
        for dim, (offset, size) in enumerate(zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)):
            part = part.narrow(dim, offset, size)
        torch.testing.assert_close(shard.tensor, part)


def tensors():
    dist.init_process_group("gloo")
    rank, full = dist.get_rank(), values(7, 4)
    made = _shard_tensor(full, chunks(0, 2, 0, 1), src_rank=1)
    assert_sharded(made, full)
    assert made._process_group is dist.group.WORLD
    assert_sharded(made.reshard(chunks(1, 1, 0)), full)
    out = torch.zeros(7, 4) if rank == 1 else None
    made.gather(1, out)
    assert rank != 1 or torch.equal(out, full)
    assert torch.equal(pickle.loads(pickle.dumps(made)), made)
    # Some of the ranks, as torch.distributed has them: one that is outside gets a tensor without shards.
    group = dist.new_group([0, 2])
    half = sharded_tensor.ones(chunks(0, 2, 0), 4, 2, process_group=group)
    assert len(half.local_shards()) == (rank != 1) and half.shape == (4, 2)
    text = pickle.dumps(half)
    with sharded.load_with_process_group(group):
        assert torch.equal(pickle.loads(text), half)
    if rank != 1:
        assert half._process_group is group
        assert_sharded(_shard_tensor(full, chunks(0, 0, 2), process_group=group), full)
    # Errors of one rank reach all.
    for call in (
        lambda: _shard_tensor(full, chunks(0, 0, 1), src_rank=rank),
        lambda: _shard_tensor(full, chunks(0, 0, 1 + rank % 2)),
        lambda: sharded.to_dtensor(
            made,
            tessera.init_device_mesh("cpu", (3,)),
            [tessera.Shard(0) if rank != 2 else tessera.Replicate()],
        ),
    ):
        with pytest.raises(ValueError):
            call()
    assert_sharded(made.reshard(chunks(0, 0, 1, 2)), full)


def torchs_own():
    """Sharded tensors of torch.distributed._shard, and distributed tensors of torch.distributed.tensor, without copying."""
    dist.init_process_group("gloo")
    rank, full = dist.get_rank(), values(6, 4)
    local = full[2 * rank : 2 * rank + 2].clone().requires_grad_()
    theirs = torchs.init_from_local_shards(
        [torchs.Shard.from_tensor_and_offsets(local, [2 * rank, 0], rank)], 6, 4
    )
    ours = tessera.from_torch(theirs)
    assert_sharded(ours, full.requires_grad_())
    assert ours.local_tensor() is local and ours.requires_grad
    assert ours.sharding_spec() == chunks(0, 0, 1, 2)
    back = tessera.to_torch(ours)
    assert type(back) is torchs.ShardedTensor and back.local_tensor() is local
    assert back.metadata() == theirs.metadata() and back.sharding_spec() == theirs.sharding_spec()
    ours.local_tensor().square().sum().backward()
    assert torch.equal(local.grad, 2 * local) and torch.equal(ours.grad.local_tensor(), local.grad)
    # Specs and shards of torch's are taken as ours.
    spec = torch_specs.ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    assert _shard_tensor(full.detach(), spec).sharding_spec() == chunks(0, 1, 0)

    mesh = reference_mesh("cpu", (3,))
    distributed = reference.distribute_tensor(full.detach(), mesh, [reference.Shard(0)])
    ours = sharded.from_dtensor(distributed)
    assert ours.local_tensor().data_ptr() == distributed.to_local().data_ptr()
    assert_sharded(ours, full.detach())
    back = tessera.to_torch(sharded.to_dtensor(ours))
    assert isinstance(back, reference.DTensor) and torch.equal(back.full_tensor(), full.detach())
    assert back.to_local().data_ptr() == ours.local_tensor().data_ptr()

    # In checkpoints of ours and of torch's.
    path = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(path)
    checkpoint.save({"theirs": theirs, "ours": ours}, os.path.join(path[0], "a"))
    target = sharded_tensor.zeros(chunks(1, 2, 1), 6, 4)
    checkpoint.load({"theirs": target}, os.path.join(path[0], "a"), strict=False)
    assert_sharded(target, full.detach())
    dcp.save({"ours": ours}, checkpoint_id=os.path.join(path[0], "b"))
    target = sharded_tensor.zeros(chunks(0, 2, 1), 6, 4)
    dcp.load({"ours": target}, checkpoint_id=os.path.join(path[0], "b"))
    assert_sharded(target, full.detach())


def remote():
    dist.init_process_group("gloo")
    rank, size, full = dist.get_rank(), dist.get_world_size(), values(6, 4)
    with pytest.raises(RuntimeError, match="RPC is not initialized"):
        sharded_tensor.ones(chunks(0, 0, 1, 2), 6, 4, init_rrefs=True)
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    rpc.init_rpc(f"node{rank}", rank=rank, world_size=size)
    local = full[2 * rank : 2 * rank + 2].clone()
    metadata = sharded.ShardMetadata([2 * rank, 0], [2, 4], f"node{rank}/cpu")
    made = sharded.init_from_local_shards([Shard(local, metadata)], 6, 4, init_rrefs=True)
    for owner, (shard,) in made.remote_shards().items():
        assert shard.owner().id == owner and shard.owner().name == f"node{owner}"
        assert torch.equal(shard.to_here().tensor, full[2 * owner : 2 * owner + 2])
    # A handle keeps the shard after its owner has let go of the tensor.
    handle = made.remote_shards()[(rank + 1) % size][0]
    del made, shard
    dist.barrier()
    owner = (rank + 1) % size
    assert torch.equal(handle.to_here().tensor, full[2 * owner : 2 * owner + 2])
    # torch's RPC goes on as before.
    assert rpc.rpc_sync(f"node{owner}", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    rpc.shutdown()


def training():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    table, plain = torch.nn.Embedding(8, 4), torch.nn.Embedding(8, 4)
    with torch.no_grad():
        for each in table, plain:
            each.weight.copy_(values(8, 4))
    sharded.shard_parameter(table, "weight", chunks(0, 1, 2, 0))
    optimisers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (table, plain)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        indices = torch.randint(8, (3, 5), generator=generator)
        table(indices[rank]).square().sum().backward()
        plain(indices.flatten()).square().sum().backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    assert_sharded(table.weight.detach(), plain.weight.detach())
    copied = copy.deepcopy(table)
    assert torch.equal(copied.weight, table.weight)
    assert torch.allclose(F.embedding(torch.arange(8), copied.weight), plain.weight)


if __name__ == "__main__":
    {"tensors": tensors, "torchs_own": torchs_own, "rpc": remote, "training": training}[sys.argv[1]]()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    print("done")
