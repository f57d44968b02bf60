"""Data parallelism: gradients reduced once, in buckets, against one device."""

import copy
import itertools

import pytest
import torch
from models import MLP, filled
from ranks import Collectives, assert_full, on_ranks, values
from tessera.parallel import (
    ColwiseParallel,
    ReplicatedModule,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    replicate,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from tessera import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlps = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mlp in self.mlps:
            x = x + mlp(self.norm(x))
        return x


def loss_of(model, x):
    return model(x).pow(2).mean()


def expected_gradients(x):
    plain = filled(Model())
    loss_of(plain, x).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def unsharded(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_gradients(model, expected):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            unsharded(parameter.grad), expected[name], **CLOSE, msg=lambda text: f"{name}: {text}"
        )


@pytest.mark.parametrize("megabytes, buckets", [(25, 1), (0.001, 4), (1e-6, 14)])
@on_ranks()
def test_by_placement(megabytes, buckets):
    mesh = init_device_mesh("cpu", (4,))
    x = values(8, 8)
    model = filled(Model())
    assert replicate(distribute_module(model, mesh), mesh, bucket_cap_mb=megabytes) is model
    assert isinstance(model, Model) and isinstance(model, ReplicatedModule)
    loss = loss_of(model, distribute_tensor(x, mesh, [Shard(0)]))
    with Collectives(mesh) as count:
        loss.backward()
    assert count == buckets
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements
    assert_gradients(model, expected_gradients(x))


@pytest.mark.parametrize("megabytes", [25, 1e-6])
@on_ranks()
def test_of_plain_parameters(megabytes):
    mesh = init_device_mesh("cpu", (4,))
    x = values(8, 8)
    model = filled(Model())
    model.register_buffer("count", torch.ones(3))
    if mesh.get_rank() != 0:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(2)
    replicate(model, mesh, bucket_cap_mb=megabytes)
    assert model.count.tolist() == [1, 1, 1]
    with Collectives(mesh) as count:
        loss_of(model, x.chunk(4)[mesh.get_rank()]).backward()
    assert count == (1 if megabytes == 25 else 14)
    assert_gradients(model, expected_gradients(x))


@pytest.mark.parametrize("distributed", [True, False])
@on_ranks()
def test_accumulation(distributed):
    mesh = init_device_mesh("cpu", (4,))
    x = values(3, 8, 8)
    model = filled(Model())
    if distributed:
        distribute_module(model, mesh)
    replicate(model, mesh)

    def backward(number):
        part = (
            distribute_tensor(x[number], mesh, [Shard(0)], src_data_rank=None)
            if distributed
            else x[number].chunk(4)[mesh.get_rank()]
        )
        (loss_of(model, part) / 3).backward()

    expected = [expected_gradients(each) for each in x]
    expected = {name: sum(each[name] for each in expected) / 3 for name in expected[0]}
    for way in ("no_sync", "set", "always"):
        model.zero_grad()
        with Collectives(mesh) as count:
            if way == "no_sync":
                with model.no_sync():
                    backward(0), backward(1)
            elif way == "set":
                model.set_requires_gradient_sync(False)
                backward(0), backward(1)
                model.set_requires_gradient_sync(True)
            else:
                backward(0), backward(1)
        assert way == "always" or count == 0
        assert not distributed or way == "always" or model.norm.weight.grad.placements == (Partial(),)
        backward(2)
        assert_gradients(model, expected)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("sequence", [True, False])
@on_ranks()
def test_beside_tensor_parallelism_by_placement(shape, sequence):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    x = values(8, 4, 8)
    model = filled(Model())
    layout = Shard(1) if sequence else Replicate()
    plan = {
        "mlps.*.up": ColwiseParallel(input_layouts=layout, use_local_output=False),
        "mlps.*.down": RowwiseParallel(output_layouts=layout, use_local_output=False),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    replicate(distribute_module(parallelize_module(model, mesh, plan), mesh), mesh["dp"])
    loss_of(model, distribute_tensor(x, mesh, [Shard(0), Replicate()])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements, name
    assert_gradients(model, expected_gradients(x))


@on_ranks()
def test_beside_tensor_parallelism_on_slices():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = values(8, 4, 8)
    model = parallelize_module(
        filled(Model()), mesh["tp"], {"mlps.*.up": ColwiseParallel(), "mlps.*.down": RowwiseParallel()}
    )
    replicate(model, mesh["dp"])
    loss = loss_of(model, x.chunk(2)[mesh.get_local_rank("dp")])
    with Collectives(mesh["dp"]) as count:
        loss.backward()
    assert count == 1  # plain and sharded gradients go together
    assert model.mlps[0].up.weight.grad.placements == (Shard(0),)
    assert_gradients(model, expected_gradients(x))


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks()
def test_with_activations_computed_again(reentrant):
    mesh = init_device_mesh("cpu", (4,))

    class Checkpointed(Model):
        def forward(self, x):
            for mlp in self.mlps:
                x = x + checkpoint(lambda y, mlp=mlp: mlp(self.norm(y)), x, use_reentrant=reentrant)
            return x

    x = values(8, 8)
    model = replicate(distribute_module(filled(Checkpointed()), mesh), mesh)
    loss_of(model, distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()).backward()
    assert_gradients(model, expected_gradients(x))
    model = replicate(filled(Checkpointed()), mesh)
    loss_of(model, x.chunk(4)[mesh.get_rank()].requires_grad_()).backward()
    assert_gradients(model, expected_gradients(x))


@pytest.mark.parametrize("megabytes", [25, 1e-6])
@on_ranks()
def test_parameters_used_inside_and_outside_of_a_checkpoint(megabytes):
    mesh = init_device_mesh("cpu", (4,))

    class Checkpointed(Model):
        def forward(self, x):
            y = checkpoint(lambda z: self.mlps[0](self.norm(z)), x, use_reentrant=True)
            return self.norm(y + x)

    x = values(8, 8)
    plain = filled(Checkpointed())
    loss_of(plain, x.clone().requires_grad_()).backward()
    expected = {
        name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None
    }
    model = replicate(filled(Checkpointed()), mesh, bucket_cap_mb=megabytes)
    loss_of(model, x.chunk(4)[mesh.get_rank()].requires_grad_()).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            model.get_parameter(name).grad, gradient, **CLOSE, msg=lambda text: f"{name}: {text}"
        )


@pytest.mark.parametrize("megabytes", [25, 0.001, 1e-6])
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("clear", [True, False])
@on_ranks()
def test_a_backward_that_fails_leaves_nothing_behind(megabytes, distributed, clear):
    mesh = init_device_mesh("cpu", (4,))
    x = values(8, 8)
    model = filled(Model())
    if distributed:
        distribute_module(model, mesh)
    replicate(model, mesh, bucket_cap_mb=megabytes)
    part = distribute_tensor(x, mesh, [Shard(0)]) if distributed else x.chunk(4)[mesh.get_rank()]

    def fail(gradient):
        raise ValueError("on purpose")

    handle = model.mlps[1].register_forward_hook(
        lambda module, inputs, output: output.register_hook(fail) and None
    )
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model, part).backward()
    handle.remove()
    if clear:
        model.zero_grad()
    else:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0
    # One that takes another way, then the same.
    plain = filled(Model())
    model.mlps[0](model.norm(part)).pow(2).mean().backward()
    plain.mlps[0](plain.norm(x)).pow(2).mean().backward()
    for parameter in model.mlps[2].parameters():
        assert parameter.grad is None if clear else not unsharded(parameter.grad).count_nonzero()
    loss_of(model, part).backward()
    loss_of(plain, x).backward()
    assert_gradients(model, {name: parameter.grad for name, parameter in plain.named_parameters()})


@on_ranks()
def test_what_is_left_alone():
    mesh = init_device_mesh("cpu", (4,))
    model = filled(Model())
    model.mlps[1].requires_grad_(False)
    replicate(model, mesh, ignored_modules=[model.mlps[0]])
    x = values(8, 8).chunk(4)[mesh.get_rank()]
    plain = filled(Model())
    loss_of(plain, x).backward()
    loss_of(model, x).backward()
    assert all(parameter.grad is None for parameter in model.mlps[1].parameters())
    torch.testing.assert_close(model.mlps[0].up.weight.grad, plain.mlps[0].up.weight.grad)
    # A gradient that no rank computes.
    model.mlps[2].up.bias.grad = None
    model.norm(x).sum().backward()
    assert model.mlps[2].up.bias.grad is None


@on_ranks()
def test_types_go_separately_and_uneven_parts_work():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make():
        model = nn.ParameterList([values(5, 3), values(7).double(), values(3, 5)])
        return model

    def loss(parameters):
        return sum((parameter.double() ** 3).sum() for parameter in parameters)

    plain, model = make(), make()
    placements = [(Replicate(), Shard(0)), (Replicate(), Replicate()), (Shard(1), Replicate())]
    for index, each in enumerate(placements):
        model[index] = nn.Parameter(distribute_tensor(model[index].detach(), mesh, each))
    replicate(model, mesh)
    # Losses that are partial along dp: each half counts what it holds of a dim of two.
    weights = distribute_tensor(torch.tensor([1.0, 2.0]).double(), mesh, [Shard(0), Replicate()])
    (weights * loss(model)).sum().backward()
    (torch.tensor([1.0, 2.0]).double() * loss(plain)).sum().backward()
    for ours, theirs in zip(model, plain):
        assert_full(ours.grad, theirs.grad, **CLOSE)
        assert ours.grad.placements == ours.placements


@on_ranks(2)
def test_mistakes():
    mesh = init_device_mesh("cpu", (2,))
    model = replicate(nn.Linear(2, 2), mesh)
    with pytest.raises(RuntimeError, match="was replicated already"):
        replicate(model, mesh)
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        replicate(nn.Linear(2, 2), mesh, bucket_cap_mb=0)


@on_ranks(2)
def test_copies_of_a_replicated_module():
    mesh = init_device_mesh("cpu", (2,))
    model = replicate(filled(MLP()), mesh)
    copied = copy.deepcopy(model)  # as for an average of the weights
    torch.testing.assert_close(copied(values(2, 8)), model(values(2, 8)))
    model(values(2, 8)).sum().backward()
    assert all(parameter.grad is None for parameter in copied.parameters())


@pytest.mark.parametrize("distributed", [True, False])
@on_ranks()
def test_training_equals_one_device(distributed):
    mesh = init_device_mesh("cpu", (4,))
    x = values(8, 8)
    plain, model = filled(Model()), filled(Model())
    if distributed:
        distribute_module(model, mesh)
    replicate(model, mesh, bucket_cap_mb=0.001)
    part = distribute_tensor(x, mesh, [Shard(0)]) if distributed else x.chunk(4)[mesh.get_rank()]
    for network, data in ((model, part), (plain, x)):
        optimiser = torch.optim.AdamW(network.parameters(), lr=0.01)
        for _ in range(5):
            optimiser.zero_grad()
            loss_of(network, data).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.1)
            optimiser.step()
    for ours, theirs in itertools.zip_longest(model.parameters(), plain.parameters()):
        unsharded = ours.full_tensor() if distributed else ours
        torch.testing.assert_close(unsharded, theirs, rtol=1e-3, atol=1e-4)
