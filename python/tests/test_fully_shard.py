"""Fully sharded training against one device: programs that are written for FSDP2, and batches that are distributed."""

import contextlib
import copy
import dataclasses
import pathlib

import pytest
import torch
from models import MLP, filled, train
from ranks import on_ranks
from tessera.experimental import implicit_replication
from tessera.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    RowwiseParallel,
    UnshardHandle,
    fully_shard,
    parallelize_module,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from test_optim import CASES, OPTIMISERS
from test_processes import launch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera
from tessera import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from tessera.debug import CommDebugMode

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Model(nn.Module):
    """Blocks, a tied embedding, a frozen layer and a scalar."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.checkpoints = checkpoints

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpoints:
                x = x + checkpoint(block, self.norm(x), use_reentrant=self.checkpoints == "reentrant")
            else:
                x = x + block(self.norm(x))
        return self.head(self.frozen(x) * self.scale)


TOKENS = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(3))


def loss_of(model, tokens=TOKENS):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    assert fully_shard(model, mesh=mesh, **options) is model
    return model


def local_part(tokens, ranks):
    return tokens.chunk(ranks)[tessera.get_rank()]


def gradients_of(model):
    return {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_gradients(model, plain):
    expected = gradients_of(plain)
    actual = gradients_of(model)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(
            gradient, expected[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert (
            dict(model.named_parameters())[name].grad.placements
            == dict(model.named_parameters())[name].placements
        )


@pytest.mark.parametrize("checkpoints", ["", "reentrant", "again"])
@pytest.mark.parametrize("reshard", [None, True, False, 2])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks()
def test_local_batches(shape, reshard, checkpoints):
    """As FSDP2: each rank has its own batch; gradients are averaged."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    plain, model = filled(Model()), sharded(filled(Model(checkpoints)), mesh, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule) and isinstance(model, Model)
    assert model.head.weight is model.embed.weight
    loss_of(plain).backward()
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model, local_part(TOKENS, 4))
        assert not isinstance(loss, DTensor)
        loss.backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("checkpoints", ["", "again"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks()
def test_distributed_batches(shape, checkpoints):
    """The loss is that of the global batch, uneven or not."""
    mesh = init_device_mesh("cpu", shape)
    for tokens in (TOKENS, TOKENS[:7]):
        plain, model = filled(Model()), sharded(filled(Model(checkpoints)), mesh)
        loss_of(plain, tokens).backward()
        loss_of(model, distribute_tensor(tokens, mesh, [Shard(0)] * len(shape))).backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("name, way", CASES)
@on_ranks(2)
def test_trains_with_every_optimiser(name, way):
    """And clips gradients. A forward between backward and the step changes nothing."""
    kind, options, _ = OPTIMISERS[name]
    extra = {} if way == "for-loop" else {way: True}
    if way == "for-loop" and name not in ("LBFGS", "Muon"):
        extra = {"foreach": False}
    mesh = init_device_mesh("cpu", (2,))
    losses = []
    for model, tokens in (
        (filled(Model()), TOKENS),
        (sharded(filled(Model()), mesh), local_part(TOKENS, 2)),
    ):
        matrices = [each for each in model.parameters() if each.requires_grad and each.dim() == 2]
        trained = matrices if name == "Muon" else [each for each in model.parameters() if each.requires_grad]
        optimizer = kind(trained, **{**options, "lr": 0.01}, **extra)

        def closure(model=model, tokens=tokens, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            if name != "LBFGS":  # whose search needs the gradient itself
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0
            # Of the global batch, as LBFGS decides by it.
            with torch.no_grad():
                return loss_of(model, TOKENS)

        losses.append([])
        for _ in range(4):
            optimizer.step(closure)
            losses[-1].append(loss_of(model, TOKENS).item())
    tolerance = 2e-2 if name == "Muon" else 1e-3  # Muon computes in bfloat16
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance / 10)


@on_ranks()
def test_with_tensor_parallel():
    """As FSDP2 with TP: slices of one mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = filled(Model()), filled(Model())
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    sharded(model, mesh["dp"])
    assert model.blocks[0].up.weight.device_mesh == mesh
    loss_of(plain).backward()
    loss_of(model, TOKENS.chunk(2)[mesh.get_local_rank("dp")]).backward()
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_accumulates():
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Model()), sharded(filled(Model()), mesh)
    for _ in range(3):
        loss_of(plain).backward()
    part = local_part(TOKENS, 2)
    for _ in range(3):
        loss_of(model, part).backward()
    assert_same_gradients(model, plain)
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        loss_of(model, part).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_requires_gradient_sync(True)
    loss_of(model, part).backward()
    assert_same_gradients(model, plain)


class Experts(nn.Module):
    """Experts of one shape in one unit. Each sample uses the ones that it names; each has a matrix and a number."""

    def __init__(self, count=3) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(count))

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for index in choice.unique().tolist():
            result = result + (choice == index)[:, None] * self.experts[index](x) * self.scales[index]
        return result


@pytest.mark.parametrize("choice", [[0, 0, 1, 1], [0, 1, 2, 0], [1, 1, 1, 1], [2, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@on_ranks()
def test_ranks_that_use_other_parameters(shape, choice):
    """What a rank did not use is zero there; what none used has no gradient."""
    mesh = init_device_mesh("cpu", shape)
    plain, model = filled(Experts()), fully_shard(filled(Experts()), mesh=mesh)
    x = torch.arange(32.0).view(4, 8).sin()
    plain(x, torch.tensor(choice)).square().sum(1).mean().backward()
    for _ in range(2):
        model.zero_grad()
        model(local_part(x, 4), local_part(torch.tensor(choice), 4)).square().sum(1).mean().backward()
        assert_same_gradients(model, plain)


@on_ranks(2)
def test_ranks_that_use_other_parameters_accumulate():
    """In passes that are not reduced, too."""
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Experts()), fully_shard(filled(Experts()), mesh=mesh)
    x = torch.arange(16.0).view(2, 8).sin()
    for choice in ([0, 1], [1, 0], [0, 0]):
        plain(x, torch.tensor(choice)).square().sum(1).mean().backward()
        model.set_requires_gradient_sync(choice == [0, 0])
        model(local_part(x, 2), local_part(torch.tensor(choice), 2)).square().sum(1).mean().backward()
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_numbers_are_reduced_with_the_rest():
    """One all-gather, one reduce-scatter, and nothing else."""
    model = fully_shard(filled(Experts()), mesh=init_device_mesh("cpu", (2,)))
    with CommDebugMode() as counts:
        model(torch.ones(2, 8), torch.tensor([0, 1])).sum().backward()
    assert counts.get_total_counts() == 2, counts.get_comm_counts()


class Choice(nn.Module):
    """One of several units."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Experts(2) for _ in range(2))

    def forward(self, x: torch.Tensor, unit: int, choice: torch.Tensor) -> torch.Tensor:
        return self.units[unit](x, choice).square().sum(1).mean()


@on_ranks(2)
def test_reduces_what_was_kept_of_units_that_are_not_used_again():
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Choice()), filled(Choice())
    for unit in model.units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, choice = torch.arange(16.0).view(2, 8).sin(), torch.tensor([1, 0])
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
        for unit in (0, 1):
            plain(x, unit, choice).backward()
            model.set_requires_gradient_sync(unit == 1)
            model(local_part(x, 2), unit, local_part(choice, 2)).backward()
        assert_same_gradients(model, plain)


class Forces(nn.Module):
    """Computes a gradient in ``forward``, and goes on with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.head(self.blocks[0](x)).sin().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(self.blocks[1](force) + self.blocks[0](x)).square().sum(1).mean()


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_gradients_inside_of_forward(reshard):
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Forces()), sharded(filled(Forces()), mesh, reshard_after_forward=reshard)
    x = torch.arange(32.0).view(4, 8).sin()
    plain(x).backward()
    for _ in range(2):
        model.zero_grad()
        model(local_part(x, 2)).backward()
        assert_same_gradients(model, plain)


class Tail(nn.Module):
    """Its last layers are small, so that they are one unit: they may be left out, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.output = MLP(), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, way: str = "all") -> torch.Tensor:
        x = self.block(x)
        if way == "all":
            return self.output(self.norm(x))
        if way == "twice":
            return self.output(self.norm(self.norm(x)))
        if way == "norm":
            return self.norm(x)
        with contextlib.suppress(RuntimeError):
            self.norm(x[:, :3])
        return self.output(x)


@pytest.mark.parametrize("order", [("norm", "output"), ("output", "norm")], ids=str)
@pytest.mark.parametrize("reshard", [None, False])
@on_ranks(2)
def test_lists_of_modules(order, reshard):
    """One unit, called in any order, in part, and after an error."""
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Tail()), filled(Tail())
    fully_shard([getattr(model, name) for name in order], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    with CommDebugMode() as counts:
        model(torch.ones(1, 8))
    assert counts.get_total_counts() == 2, counts.get_comm_counts()  # an all-gather for each unit
    x = torch.arange(32.0).view(4, 8).sin()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for way in ("all", "norm", "all", "error", "twice", "all"):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(x, way).square().sum(1).mean().backward()
        loss = model(local_part(x, 2), way).square().sum(1).mean()
        assert all(isinstance(each, DTensor) for each in model.parameters()), way
        loss.backward()
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(2)
def test_lists_of_modules_alone():
    """Without a unit around them, a pass that leaves one out ends when the next one begins."""
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Tail()), filled(Tail())
    fully_shard([model.block, model.norm, model.output], mesh=mesh)
    x = torch.arange(32.0).view(4, 8).sin()
    shards = list(model.parameters())
    for way in ("norm", "all", "norm", "twice", "all"):
        plain.zero_grad()
        for each in shards:
            each.grad = None
        plain(x, way).square().sum(1).mean().backward()
        model(local_part(x, 2), way).square().sum(1).mean().backward()
        for each, expected in zip(shards, plain.parameters(), strict=True):
            assert (each.grad is None) == (expected.grad is None)
            if each.grad is not None:
                torch.testing.assert_close(each.grad.full_tensor(), expected.grad, **CLOSE)
        with torch.no_grad():  # which the next pass sees
            for each, other in zip(shards, plain.parameters(), strict=True):
                each.mul_(1.5)
                other.mul_(1.5)


@on_ranks(2)
def test_a_unit_inside_of_itself():
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self.linear(x if depth == 0 else self(x, depth - 1).tanh())

    model = fully_shard(filled(Tree()), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    plain, x = filled(Tree()), torch.arange(32.0).view(4, 8).sin()
    plain(x).square().sum(1).mean().backward()
    model(local_part(x, 2)).square().sum(1).mean().backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_parameters_that_units_share(reshard):
    """A unit has them, and what is around it uses them too: they stay one parameter."""
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Model()), filled(Model())
    fully_shard(model.embed, mesh=mesh, reshard_after_forward=reshard)
    sharded(model, mesh, reshard_after_forward=reshard)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(plain).backward()
        if step == 1:
            loss_of(model, distribute_tensor(TOKENS, mesh, [Shard(0)])).backward()
        else:
            first = loss_of(model, local_part(TOKENS, 2))  # whose backward comes after another forward
            loss_of(model, local_part(TOKENS, 2))
            first.backward()
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert model.head.weight is model.embed.weight


@on_ranks(2)
def test_units_side_by_side_share_no_parameters():
    mesh = init_device_mesh("cpu", (2,))
    model = filled(Model())
    fully_shard(model.embed, mesh=mesh)
    with pytest.raises(ValueError, match=r"'weight' of this Linear is shared with another unit.*\[first"):
        fully_shard(model.head, mesh=mesh)


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    label: str = ""


class Opaque:
    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens


class OfBatches(Model):
    def forward(self, batch):
        return Batch(super().forward(batch.tokens))


@pytest.mark.parametrize("kind", [Batch, Opaque])
@on_ranks(2)
def test_batches_that_are_no_tensors(kind):
    """Dataclasses are looked into; what cannot be seen is this rank's own."""
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Model()), sharded(filled(OfBatches()), mesh)
    loss_of(plain).backward()
    for distributed in (False, kind is Batch, False):
        model.zero_grad()
        tokens = distribute_tensor(TOKENS, mesh, [Shard(0)]) if distributed else local_part(TOKENS, 2)
        logits = model(kind(tokens)).tokens
        assert isinstance(logits, DTensor) == distributed
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        assert_same_gradients(model, plain)


@on_ranks(2)
def test_mixed_precision():
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(Model()), filled(Model())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    )
    seen = []
    model.blocks[0].up.register_forward_hook(
        lambda module, args, output: seen.extend([module.weight.dtype, output.dtype])
    )
    loss_of(plain).backward()
    output = model(local_part(TOKENS, 2))
    assert output.dtype == torch.float32 and seen == [torch.bfloat16] * 2
    loss_of(model, local_part(TOKENS, 2)).backward()
    for name, gradient in gradients_of(model).items():
        expected = dict(plain.named_parameters())[name].grad
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() <= 0.05 * expected.norm() + 1e-3, name


@on_ranks(2)
def test_communicates_once():
    mesh = init_device_mesh("cpu", (2,))
    model = sharded(filled(Model()), mesh)
    for _ in range(2):
        with CommDebugMode() as counts:
            loss_of(model, local_part(TOKENS, 2)).backward()
        by_name = {str(name): count for name, count in counts.get_comm_counts().items()}
        gathers = sum(count for name, count in by_name.items() if "gather" in name)
        scatters = sum(count for name, count in by_name.items() if "scatter" in name)
        assert (gathers, scatters) == (4 + 3, 4), by_name


def test_deferred_initialisation():
    """On meta, then allocated and filled shard by shard: the same numbers on any ranks."""
    found = {}

    def body(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with torch.device("meta"):
            model = Model()
        sharded(model, mesh)
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        model.head.weight = model.embed.weight
        tessera.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        assert model.blocks[0].up.weight.to_local().shape == (16 // ranks, 8)
        loss_of(model, TOKENS).backward()
        values = {name: each.full_tensor().clone() for name, each in model.named_parameters()}
        if tessera.get_rank() == 0:
            found[ranks] = values

    for ranks in (1, 2, 4):
        tessera.run(ranks, lambda ranks=ranks: body(ranks), timeout=60)
        for name, value in found[ranks].items():
            assert torch.equal(value, found[1][name]), name


def test_goes_on_from_a_checkpoint_on_another_mesh(tmp_path):
    """With the optimizer's state: the losses of one device that was never interrupted."""

    def steps(model, tokens, count, path=None, save=False):
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
        if path and not save:
            # The optimizer's state has to be there to be loaded.
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            tessera.checkpoint.load(state, path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            optimizer.step()
            losses.append(loss_of(model, TOKENS).item())
        if save:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            tessera.checkpoint.save(state, path)
        return losses

    expected = steps(filled(Model()), TOKENS, 6)

    @on_ranks()
    def first():
        model = sharded(filled(Model()), init_device_mesh("cpu", (4,)))
        losses = steps(model, local_part(TOKENS, 4), 3, path=tmp_path / "state", save=True)
        torch.testing.assert_close(losses, expected[:3], **CLOSE)

    @on_ranks()
    def second():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(Model(), mesh)
        torch.testing.assert_close(
            steps(model, local_part(TOKENS, 4), 3, path=tmp_path / "state"), expected[3:], **CLOSE
        )

    @on_ranks(2)
    def third():
        model = sharded(Model(), init_device_mesh("cpu", (2,)))
        torch.testing.assert_close(
            steps(model, local_part(TOKENS, 2), 3, path=tmp_path / "state"), expected[3:], **CLOSE
        )

    first()
    second()
    third()


@on_ranks(2)
def test_other_methods_and_outside_of_forward():
    mesh = init_device_mesh("cpu", (2,))
    model = sharded(filled(Model()), mesh, reshard_after_forward=True)
    plain = filled(Model())
    model.logits = model.forward
    register_fsdp_forward_method(model, "logits")
    torch.testing.assert_close(model.logits(TOKENS), plain(TOKENS), **CLOSE)
    # Outside, parameters are shards, in every mode.
    weight = model.blocks[0].up.weight
    assert isinstance(weight, DTensor) and weight.detach().to_local().shape == (8, 8)
    assert (weight * 2).to_local().shape == (8, 8)
    state = model.state_dict()
    assert all(
        value.to_local().numel() <= (value.numel() + 7) // 2 + 8 for value in state.values() if value.dim()
    )
    model.load_state_dict(state)
    model.unshard()
    model.reshard()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), plain(TOKENS), **CLOSE)
    with torch.inference_mode():
        torch.testing.assert_close(model(TOKENS), plain(TOKENS), **CLOSE)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1) if parameter.dim() else None},
        {"mesh": None},
        {"offload_policy": OffloadPolicy()},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)},
    ],
    ids=["placement", "no mesh", "no offload", "offload", "no cast"],
)
@on_ranks(2)
def test_keywords(options):
    plain, model = filled(Model()), filled(Model())
    options = {"mesh": init_device_mesh("cpu", (2,)), **options}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if "shard_placement_fn" in options:
        assert model.blocks[0].up.weight.placements == (Shard(1),)
    share_comm_ctx([model, model.blocks[0]])
    handle = model.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    loss_of(plain).backward()
    loss_of(model, local_part(TOKENS, 2)).backward()
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_inputs_need_not_be_cast():
    """Then they meet the parameters as they are."""
    mesh = init_device_mesh("cpu", (2,))
    for casts in (True, False):
        policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=casts)
        model = fully_shard(filled(MLP()), mesh=mesh, mp_policy=policy)
        if casts:
            assert model(torch.ones(2, 8)).dtype == torch.bfloat16
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                model(torch.ones(2, 8))
            assert model(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@on_ranks(2)
def test_ignored_parameters():
    """They stay as they are, and their gradients this rank's own."""
    mesh = init_device_mesh("cpu", (2,))
    plain, alone, model = filled(Model()), filled(Model()), filled(Model())
    ignored = {model.blocks[0].up.weight, model.embed.weight}
    sharded(model, mesh, ignored_params=ignored)
    assert model.head.weight is model.embed.weight and model.embed.weight in ignored
    loss_of(plain).backward()
    loss_of(alone, local_part(TOKENS, 2)).backward()
    loss_of(model, local_part(TOKENS, 2)).backward()
    for (name, parameter), (_, whole), (_, own) in zip(
        model.named_parameters(), plain.named_parameters(), alone.named_parameters(), strict=True
    ):
        assert isinstance(parameter, DTensor) == (parameter not in ignored), name
        if parameter.grad is None:
            assert whole.grad is None, name
        elif parameter in ignored:
            torch.testing.assert_close(parameter.grad, own.grad, **CLOSE)
        else:
            torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad, **CLOSE)


@on_ranks(2)
def test_kept_after_backward():
    model = sharded(filled(Model()), init_device_mesh("cpu", (2,)))
    model.set_reshard_after_backward(False)
    loss_of(model, local_part(TOKENS, 2)).backward()
    with CommDebugMode() as counts:
        loss_of(model, local_part(TOKENS, 2))
    assert counts.get_total_counts() == 0, counts.get_comm_counts()
    model.set_reshard_after_backward(True)
    loss_of(model, local_part(TOKENS, 2)).backward()
    with CommDebugMode() as counts:
        loss_of(model, local_part(TOKENS, 2))
    assert counts.get_total_counts() == 4, counts.get_comm_counts()


@on_ranks(2)
def test_gradients_divided_by_another_number():
    mesh = init_device_mesh("cpu", (2,))
    plain, model = filled(MLP()), fully_shard(filled(MLP()), mesh=mesh)
    model.set_gradient_divide_factor(1.0)  # sums
    x = torch.arange(32.0).view(4, 8).sin()
    plain(x).square().sum().backward()
    model(local_part(x, 2)).square().sum().backward()
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_says_what_is_wrong():
    mesh = init_device_mesh("cpu", (2,))
    model = filled(Model())

    class DiskOffloadPolicy:
        pass

    with pytest.raises(NotImplementedError, match="offload_policy.*mesh of cpu"):
        fully_shard(model, mesh=mesh, offload_policy=DiskOffloadPolicy())
    with pytest.raises(ValueError, match="got Model"):
        share_comm_ctx([model])
    with pytest.raises(ValueError, match="divides the 2"):
        fully_shard(filled(Model()), mesh=mesh, reshard_after_forward=3)
    for placement, error, text in (
        (Shard(1), IndexError, "no dim 1 to shard"),
        (Replicate(), ValueError, "returns Shard"),
    ):

        def bad(parameter, placement=placement):
            return placement if parameter.dim() == 1 else None

        with pytest.raises(error, match=text):
            fully_shard(model, mesh=mesh, shard_placement_fn=bad)
        assert not any(isinstance(each, DTensor) for each in model.parameters())  # it can be tried again
    sharded(model, mesh)
    with pytest.raises(RuntimeError, match="sharded already"):
        fully_shard(model, mesh=mesh)
    with pytest.raises(TypeError, match="copied"):
        copy.deepcopy(model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_transformers(name, shape):
    """Ten steps of models as the package has them; with two mesh dims there are replicas."""
    pytest.importorskip("transformers")
    import test_transformers as models

    make = {"llama": models.llama, "gpt2": models.gpt2}[name]
    models.on_one_device(make, "sdpa")
    ranks = torch.Size(shape).numel()

    @on_ranks(ranks)
    def body():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = sharded_transformer(make("sdpa").double(), mesh)
        losses = train(
            model, lambda model: models.loss_on(local_part(models.TOKENS, ranks), model), models.STEPS
        )
        of_all = DTensor.from_local(torch.tensor(losses), mesh, [tessera.Partial("avg")] * mesh.ndim)
        models.assert_as_on_one_device(of_all.full_tensor().tolist(), model.parameters(), make, "sdpa")

    body()


def sharded_transformer(model, mesh):
    for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_with_tensor_parallel(name):
    """Llama between plain tensors, as with FSDP2; GPT-2, whose fused projection is split, by placement."""
    pytest.importorskip("transformers")
    import test_transformers as models

    make = {"llama": models.llama, "gpt2": models.gpt2}[name]
    models.on_one_device(make, "sdpa")

    @on_ranks()
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = make("sdpa").double()
        if name == "llama":
            parallelize_module(model, mesh["tp"], models.llama_plan(True))
            tokens = models.TOKENS.chunk(2)[mesh.get_local_rank("dp")]
        else:
            distribute_module(parallelize_module(model, mesh, models.gpt2_plan()), mesh)
            tokens = distribute_tensor(models.TOKENS, mesh, [Shard(0), Replicate()])
        sharded_transformer(model, mesh["dp"])
        with implicit_replication() if name == "gpt2" else contextlib.nullcontext():
            losses = train(model, lambda model: models.loss_on(tokens, model), models.STEPS)
        if name == "llama":
            of_all = DTensor.from_local(torch.tensor(losses), mesh["dp"], [tessera.Partial("avg")])
            losses = of_all.full_tensor().tolist()
        models.assert_as_on_one_device(losses, model.parameters(), make, "sdpa")

    body()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_program_for_fsdp2_runs_after_changing_the_import(tmp_path, ranks):
    """And prints what it prints with FSDP2."""
    program = pathlib.Path(__file__).with_name("fsdp2_program.py")
    ours = tmp_path / "program.py"
    theirs = "from torch.distributed.fsdp import "
    assert program.read_text().count(theirs) == 1
    ours.write_text(program.read_text().replace(theirs, "from tessera.parallel import "))
    expected, actual = (launch(ranks, worker=path)[0].split() for path in (program, ours))
    assert len(expected) > 100 and len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if a != b:
            torch.testing.assert_close(float(a), float(b), rtol=1e-3, atol=1e-4)
