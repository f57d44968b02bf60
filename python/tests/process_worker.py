"""What each process of test_processes.py runs."""

import os
import sys

import torch
import torch.distributed as dist
from models import MLP, filled, train
from ranks import assert_full, placements_of, values
from tessera.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, replicate
from torch.distributed import tensor as reference
from torch.distributed.device_mesh import init_device_mesh as reference_mesh

import tessera
from tessera import DTensor, Partial, Replicate, Shard
from tessera.debug import CommDebugMode


def tensors():
    dist.init_process_group("gloo")
    mesh = tessera.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    assert mesh.get_group("dp") is dist.group.WORLD
    full = values(5, 3)
    for source in placements_of(full, mesh):
        x = tessera.distribute_tensor(full, mesh, source)
        for target in placements_of(full, mesh):
            assert_full(x.redistribute(placements=target), full)
    x = tessera.distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    (x @ x.T).relu().sum().backward()
    plain = full.requires_grad_()
    (plain @ plain.T).relu().sum().backward()
    assert_full(x.grad, plain.grad)
    assert torch.equal(x[4].full_tensor(), plain[4])
    # A world that is made anew is noticed.
    dist.destroy_process_group()
    # On a store of its own: a rank that is early would find the first one's addresses.
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    dist.init_process_group("gloo")
    again = tessera.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    assert_full(tessera.distribute_tensor(full.detach(), again, [Shard(0)]), full.detach())


def training():
    dist.init_process_group("gloo")
    mesh = tessera.init_device_mesh("cpu", (dist.get_world_size(),))
    model, plain = (
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)) for _ in range(2)
    )
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.copy_(values(*parameter.shape, seed=number))
    model.load_state_dict(plain.state_dict())
    for index, placement in ((0, Shard(0)), (2, Shard(1))):
        layer = model[index]
        bias = placement if index == 0 else Replicate()
        layer.weight = torch.nn.Parameter(tessera.distribute_tensor(layer.weight.data, mesh, [placement]))
        layer.bias = torch.nn.Parameter(tessera.distribute_tensor(layer.bias.data, mesh, [bias]))
    data = values(7, 6)
    for network, inputs in ((model, tessera.distribute_tensor(data, mesh)), (plain, data)):
        optimiser = torch.optim.AdamW(network.parameters(), lr=0.01)
        for _ in range(10):
            optimiser.zero_grad()
            network(inputs).pow(2).mean().backward()
            optimiser.step()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert_full(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)


def bridge():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    theirs_mesh = reference_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))
    full = values(5, 3)
    for theirs_placements, ours_placements in (
        ([reference.Shard(0), reference.Replicate()], (Shard(0), Replicate())),
        ([reference.Replicate(), reference.Shard(1)], (Replicate(), Shard(1))),
        ([reference.Partial(), reference.Replicate()], (Partial(), Replicate())),
    ):
        theirs = reference.distribute_tensor(full, theirs_mesh, theirs_placements)
        ours = tessera.from_torch(theirs)
        assert isinstance(ours, DTensor) and not isinstance(ours, reference.DTensor)
        assert ours.placements == ours_placements and ours.device_mesh.mesh_dim_names == ("dp", "tp")
        assert ours.to_local().data_ptr() == theirs.to_local().data_ptr()
        assert_full(ours, full)
        back = tessera.to_torch(ours)
        assert isinstance(back, reference.DTensor) and not isinstance(back, DTensor)
        assert list(back.placements) == theirs_placements and back.device_mesh.mesh_dim_names == ("dp", "tp")
        assert back.to_local().data_ptr() == theirs.to_local().data_ptr()
        torch.testing.assert_close(back.full_tensor(), full)
    # Gradients flow through, both ways.
    theirs = reference.distribute_tensor(
        full, theirs_mesh, [reference.Shard(0), reference.Replicate()]
    ).requires_grad_()
    (tessera.to_torch(tessera.from_torch(theirs) * 3) * 2).sum().backward()
    torch.testing.assert_close(theirs.grad.full_tensor(), torch.full((5, 3), 6.0))
    # Placements and meshes of theirs are understood where ours are.
    x = tessera.distribute_tensor(full, theirs_mesh, [reference.Shard(1), reference.Replicate()])
    assert x.placements == (Shard(1), Replicate())
    assert_full(x, full)
    assert theirs.placements == (
        reference.Shard(0),
        reference.Replicate(),
    )  # their own attributes stay theirs


def initialise():
    """Started by a launcher, the first mesh initialises torch.distributed."""
    mesh = tessera.init_device_mesh("cpu", (2,))
    assert dist.is_initialized() and tessera.get_rank() == dist.get_rank() and tessera.get_world_size() == 2
    assert_full(tessera.ones(5, device_mesh=mesh, placements=[Shard(0)]), torch.ones(5))
    # Threads that are ranks have their own world.
    assert tessera.run(3, tessera.get_world_size) == [3, 3, 3]


def sub_groups():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    mesh = tessera.init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    assert dist.get_process_group_ranks(group) == [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
    value = torch.ones(1)
    dist.all_reduce(value, group=group)  # it is an ordinary group of torch.distributed
    assert value.item() == 2
    full = values(5, 4)
    for placements in placements_of(full, mesh):
        x = tessera.distribute_tensor(full, mesh, placements)
        assert_full(x, full)
        assert_full(x @ x.T, full @ full.T)
    turned = tessera.DeviceMesh._concatenate([mesh["tp"], mesh["dp"]])
    assert_full(tessera.distribute_tensor(full, turned, [Shard(0), Shard(0)]), full)
    assert_full(
        tessera.distribute_tensor(full, mesh, [Shard(0), Shard(0)]).redistribute(
            placements=[Replicate(), Shard(0)]
        ),
        full,
    )


def parallel_training():
    """Tensors and data parallel: by placement, and with local tensors on slices of the mesh."""
    dist.init_process_group("gloo")
    tensor_ranks = 2 if dist.get_world_size() == 4 else 1
    mesh = tessera.init_device_mesh(
        "cpu", (dist.get_world_size() // tensor_ranks, tensor_ranks), mesh_dim_names=("dp", "tp")
    )
    x = values(8, 8)
    plain = filled(MLP())
    expected = train(plain, lambda model: model(x).pow(2).mean())
    for local in (False, True):
        model = filled(MLP())
        plan = {
            "up": ColwiseParallel(use_local_output=local),
            "down": RowwiseParallel(use_local_output=local),
        }
        parallelize_module(model, mesh["tp"] if local else mesh, plan)
        replicate(model, mesh["dp"], bucket_cap_mb=1e-3)
        part = (
            x.chunk(mesh.size(0))[mesh.get_local_rank("dp")]
            if local
            else tessera.distribute_tensor(x, mesh, [Shard(0), Replicate()])
        )
        losses = train(model, lambda model: model(part).pow(2).mean())
        if local:
            losses = (
                DTensor.from_local(torch.tensor(losses), mesh["dp"], [Partial("avg")]).full_tensor().tolist()
            )
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert_full(ours.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)


def meshes():
    """Groups with backends of their own, and what is communicated on them."""
    import torch.testing._internal.distributed.fake_pg  # the backend "fake"

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    options = dist.ProcessGroupGloo._Options()
    mesh = tessera.init_device_mesh(
        "cpu",
        (size // 2, 2),
        mesh_dim_names=("dp", "tp"),
        backend_override={"dp": "fake", 1: ("gloo", options)},
    )
    assert mesh.get_group("dp")._get_backend_name() == "custom"  # as that of "fake" is called
    assert mesh.get_group("tp")._get_backend_name() == "gloo"
    assert mesh.get_group("tp").group_desc == "mesh_tp" and mesh.get_group("tp") is not dist.group.WORLD
    part = tessera.distribute_tensor(values(4, 3), mesh["tp"], [Shard(0)])
    assert_full(part, values(4, 3))
    flat = mesh._flatten("all", backend_override="gloo")
    assert mesh["all"].get_group() is flat.get_group() and flat.get_group().group_desc == "mesh_all"
    split = flat._unflatten(0, (size // 2, 2), ("a", "b"), backend_override={"b": "fake"})
    assert split.get_group("b")._get_backend_name() == "custom"
    plain = tessera.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp-0", "tp-0"))
    assert size == 2 or plain.get_group("tp-0").group_desc == "mesh_tp-0"
    x = tessera.distribute_tensor(values(8, 4), plain, [Replicate(), Shard(0)])
    with CommDebugMode() as mode:
        x.full_tensor()
        dist.all_reduce(torch.ones(1))
    assert mode.get_comm_counts() == {
        torch.ops.c10d_functional.all_gather_into_tensor: 1,
        torch.ops.c10d.allreduce_: 1,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    bodies = (tensors, training, bridge, initialise, sub_groups, parallel_training, meshes)
    {function.__name__: function for function in bodies}[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
    print("done")
