"""Fully sharded training against one device: programs that are written for FSDP2, and batches that are distributed."""

import contextlib
import copy
import pathlib

import pytest
import torch
from models import MLP, filled, train
from ranks import on_ranks
from tessera.experimental import implicit_replication
from tessera.parallel import (
    ColwiseParallel,
    FSDPModule,
    MixedPrecisionPolicy,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
    register_fsdp_forward_method,
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


@on_ranks(2)
def test_says_what_is_wrong():
    mesh = init_device_mesh("cpu", (2,))
    model = filled(Model())

    class CPUOffloadPolicy:
        pass

    with pytest.raises(NotImplementedError, match="offload_policy"):
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    with pytest.raises(ValueError, match="divides the 2"):
        fully_shard(filled(Model()), mesh=mesh, reshard_after_forward=3)
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
