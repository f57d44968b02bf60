"""distribute_module and the parallel styles, against one device."""

import itertools
import warnings

import pytest
import torch
from models import MLP, Conv1D, filled
from ranks import Collectives, assert_full, on_ranks, values
from tessera.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
    parallelize_module,
)
from torch import nn

import tessera
from tessera import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _StridedShard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        torch.testing.assert_close(gradient, other.grad, **CLOSE, msg=lambda text: f"{name}: {text}")


# --- distribute_module ---------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


@on_ranks()
def test_distribute_module_replicates_by_default():
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))):
        model = Small()  # random: the first rank's count
        model.first.weight.requires_grad_(False)
        kept = model.second.weight.requires_grad
        assert distribute_module(model, mesh) is model
        for tensor in (*model.parameters(), *model.buffers()):
            assert isinstance(tensor, DTensor) and tensor.placements == (Replicate(),) * mesh.ndim
        assert isinstance(model.first.weight, nn.Parameter) and not isinstance(
            model.norm.running_mean, nn.Parameter
        )
        assert not model.first.weight.requires_grad and model.second.weight.requires_grad is kept
        sums = tessera.DTensor.from_local(
            model.first.weight.to_local(), mesh, [Partial("min")] * mesh.ndim
        ).full_tensor()
        torch.testing.assert_close(sums, model.first.weight.to_local())  # the same everywhere
        with pytest.raises(RuntimeError, match="distributed already"):
            distribute_module(model, mesh)


@on_ranks()
def test_distribute_module_with_functions():
    mesh = init_device_mesh("cpu", (4,))
    seen = []

    def partition(name, module, given):
        assert given == mesh
        seen.append(name)
        if isinstance(module, nn.Linear):
            module.register_parameter("weight", distribute_tensor(module.weight, mesh, [Shard(0)]))

    def inputs(module, args, given):
        assert isinstance(module, Small) and given == mesh
        return distribute_tensor(args[0], mesh, [Shard(0)])

    def outputs(module, output, given):
        assert isinstance(output, DTensor) and given == mesh
        return output.full_tensor()

    plain, model = filled(Small()), filled(Small())
    distribute_module(model, mesh, partition, inputs, outputs)
    assert seen == ["", "first", "second", "norm"]
    assert model.first.weight.placements == (Shard(0),) and model.first.bias.placements == (Replicate(),)
    x = values(9, 6)
    y, expected = model(x), plain(x)
    assert not isinstance(y, DTensor)
    torch.testing.assert_close(y, expected, **CLOSE)
    assert_full(model.norm.running_mean, plain.norm.running_mean, **CLOSE)
    y.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert_same_gradients(model, plain)


@on_ranks(1)  # pytest.warns is not for several threads
def test_functions_of_two_arguments_are_deprecated_and_others_refused():
    mesh = init_device_mesh("cpu", (1,))
    with pytest.warns(FutureWarning, match="Deprecating input_fn"):
        model = distribute_module(
            nn.Linear(3, 3), mesh, input_fn=lambda args, mesh: distribute_tensor(args[0], mesh)
        )
    assert isinstance(model(values(2, 3)), DTensor)
    with pytest.raises(ValueError, match="output_fn takes three arguments"):
        distribute_module(nn.Linear(3, 3), mesh, output_fn=lambda output: output)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


@on_ranks()
def test_what_is_shared_stays_shared():
    mesh = init_device_mesh("cpu", (4,))
    tokens = torch.tensor([[1, 5, 5], [11, 0, 7]])
    plain = filled(Tied())
    plain(tokens).pow(2).sum().backward()

    replicated = distribute_module(filled(Tied()), mesh)
    assert replicated.head.weight is replicated.embedding.weight

    def partition(name, module, mesh):
        if name == "embedding":
            module.register_parameter("weight", distribute_tensor(module.weight, mesh, [Shard(0)]))

    sharded = distribute_module(filled(Tied()), mesh, partition)
    assert sharded.head.weight is sharded.embedding.weight and sharded.head.weight.placements == (Shard(0),)

    options = {"use_local_output": False}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **options),
        "head": ColwiseParallel(**options),
    }
    styled = parallelize_module(filled(Tied()), mesh, plan)
    assert styled.head.weight is styled.embedding.weight and len(list(styled.parameters())) == 1
    for model in (replicated, sharded, styled):
        model(distribute_tensor(tokens, mesh)).pow(2).sum().backward()
        assert_same_gradients(model, plain)

    with pytest.raises(ValueError, match=r"one parameter.*embedding.weight \(placed .*head.weight \(placed"):
        parallelize_module(Tied(), mesh, {"embedding": ColwiseParallel(), "head": ColwiseParallel()})
    # One that is not parallelised yet has the parameter too, and refuses what does not fit.
    half = parallelize_module(Tied(), mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})
    assert half.head.weight is half.embedding.weight
    with pytest.raises(ValueError, match="plain tensor"):
        half(tokens)


# --- columns and rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_mlp(world_size, sequence, bias):
    @on_ranks(world_size)
    def test():
        mesh = init_device_mesh("cpu", (world_size,))
        plain, model = filled(MLP(bias)), filled(MLP(bias))
        x = values(2, 12, 8).requires_grad_()
        part = x.detach().tensor_split(world_size, 1)[mesh.get_rank()] if sequence else x.detach().clone()
        part.requires_grad_()
        layout = Shard(1) if sequence else Replicate()
        plan = {"up": ColwiseParallel(input_layouts=layout), "down": RowwiseParallel(output_layouts=layout)}
        parallelize_module(model, mesh, plan)
        assert model.up.weight.placements == (Shard(0),) and model.down.weight.placements == (Shard(1),)
        assert not bias or (model.up.bias.placements, model.down.bias.placements) == (
            (Shard(0),),
            (Replicate(),),
        )
        with Collectives(mesh) as forward, tessera.implicit_communication("forbidden"):
            y = model(part)
        # An all-reduce; or the sizes of the shards, an all-gather and a reduce-scatter.
        assert forward == (3 if sequence else 1)
        expected = plain(x)
        expected.pow(2).sum().backward()
        if sequence:
            torch.testing.assert_close(y, expected.tensor_split(world_size, 1)[mesh.get_rank()], **CLOSE)
        else:
            torch.testing.assert_close(y, expected, **CLOSE)
        with Collectives(mesh) as backward:
            y.pow(2).sum().backward()
        assert backward == (2 if sequence else 1)
        assert_same_gradients(model, plain)
        torch.testing.assert_close(
            part.grad, x.grad.tensor_split(world_size, 1)[mesh.get_rank()] if sequence else x.grad, **CLOSE
        )

    test()


@on_ranks()
def test_layouts_and_local_output():
    mesh = init_device_mesh("cpu", (4,))
    x = values(4, 8)
    for style, local in itertools.product((ColwiseParallel, RowwiseParallel), (True, False)):
        for given, output in itertools.product((Replicate(), Shard(0), Shard(1), Shard(-1), None), repeat=2):
            plain, model = filled(nn.Linear(8, 12)), filled(nn.Linear(8, 12))
            parallelize_module(
                model, mesh, style(input_layouts=given, output_layouts=output, use_local_output=local)
            )
            default = Replicate() if style is ColwiseParallel else Shard(1)
            y = model(distribute_tensor(x, mesh, [given or default]).to_local())
            expected = plain(x)
            default = Shard(1) if style is ColwiseParallel else Replicate()
            placed = distribute_tensor(expected.detach(), mesh, [output or default])
            assert isinstance(y, DTensor) is not local
            torch.testing.assert_close(y if local else y.to_local(), placed.to_local(), **CLOSE)
            assert local or y.placements == placed.placements
    assert isinstance(
        model(distribute_tensor(x, mesh, [Shard(0)])), DTensor
    )  # distributed inputs are placed as needed


@pytest.mark.parametrize("style, sharding", [(ColwiseParallel, Shard(1)), (RowwiseParallel, Shard(0))])
@on_ranks()
def test_embedding(style, sharding):
    mesh = init_device_mesh("cpu", (4,))
    tokens = torch.tensor([[1, 5, 5], [9, 0, 7]])
    for rows, padding in ((10, None), (16, 5)):
        plain, model = (filled(nn.Embedding(rows, 8, padding_idx=padding)) for _ in range(2))
        parallelize_module(model, mesh, style(input_layouts=Replicate(), output_layouts=Replicate()))
        assert model.weight.placements == (sharding,)
        with Collectives(mesh) as forward:
            y = model(tokens)
        assert forward == 1
        torch.testing.assert_close(y, plain(tokens))
        y.pow(2).sum().backward()
        plain(tokens).pow(2).sum().backward()
        assert_same_gradients(model, plain)


@on_ranks()
def test_a_linear_layer_with_its_weight_the_other_way_round():
    mesh = init_device_mesh("cpu", (4,))
    plain, model = (filled(nn.Sequential(Conv1D(16, 8), nn.GELU(), Conv1D(8, 16))) for _ in range(2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = values(2, 3, 8)
    with Collectives(mesh) as forward, tessera.implicit_communication("forbidden"):
        y = model(x)
    assert forward == 1
    torch.testing.assert_close(y, plain(x), **CLOSE)
    y.pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    assert_same_gradients(model, plain)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@on_ranks()
def test_outputs_that_are_split():
    mesh = init_device_mesh("cpu", (4,))
    plain, model = filled(FusedAttention()), filled(FusedAttention())
    plan = {
        "qkv": ColwiseParallel(blocks=3, use_local_output=False),
        "out": RowwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    assert model.qkv.weight.placements == model.qkv.bias.placements == (_StridedShard(0, split_factor=3),)
    x = values(2, 5, 8)
    with Collectives(mesh) as count, tessera.implicit_communication("forbidden"):
        y = model(distribute_tensor(x, mesh, src_data_rank=None))
    assert count == 1
    assert_full(y, plain(x), **CLOSE)
    loss = y.pow(2).sum()
    with Collectives(mesh) as count, tessera.implicit_communication("forbidden"):
        loss.backward()
    assert count == 0 and model.qkv.weight.grad.placements == model.qkv.weight.placements
    plain(x).pow(2).sum().backward()
    assert_same_gradients(model, plain)
    # Local tensors: this rank's heads of each.
    local = parallelize_module(filled(nn.Linear(8, 24)), mesh, ColwiseParallel(blocks=3))
    expected = filled(nn.Linear(8, 24))(x).chunk(3, -1)
    torch.testing.assert_close(
        local(x), torch.cat([part.chunk(4, -1)[mesh.get_rank()] for part in expected], -1), **CLOSE
    )
    with pytest.raises(ValueError, match="blocks is the number of pieces"):
        ColwiseParallel(blocks=0)


@on_ranks(2)
def test_the_source_of_parameters():
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_rank()
    for source in (0, 1, None):
        for plan in (ColwiseParallel(), {"": ColwiseParallel()}, SequenceParallel()):
            model = nn.Linear(4, 4, bias=False)
            nn.init.constant_(model.weight, float(rank))
            parallelize_module(model, mesh, plan, src_data_rank=source)
            assert model.weight.to_local().unique().tolist() == [float(rank if source is None else source)]


# --- sequences -----------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """As Llama's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, nn.RMSNorm, RMSNorm, lambda width: nn.LayerNorm(width, bias=False)]
)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@on_ranks()
def test_norms_along_sequences(norm, local, dim):
    mesh = init_device_mesh("cpu", (4,))
    plain, model = filled(norm(8)), filled(norm(8))
    parallelize_module(model, mesh, SequenceParallel(sequence_dim=dim, use_local_output=local))
    assert all(parameter.placements == (Replicate(),) for parameter in model.parameters())
    x = values(8, 12, 8)
    for given in (
        distribute_tensor(x, mesh, [Shard(dim)]).to_local(),
        distribute_tensor(x, mesh),
        distribute_tensor(x, mesh, [Shard(dim)]),
    ):
        model.zero_grad(), plain.zero_grad()
        with Collectives(mesh) as forward:
            y = model(given)
        # Ranks exchange the sizes of plain shards.
        assert forward == (0 if isinstance(given, DTensor) else 1) and isinstance(y, DTensor) is not local
        if local:
            y = DTensor.from_local(y, mesh, [Shard(dim)])
        assert y.placements == (Shard(dim),)
        assert_full(y, plain(x), **CLOSE)
        y.pow(2).sum().backward()
        plain(x).pow(2).sum().backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("length", [7, 5, 1])
@on_ranks()
def test_uneven_parts_of_sequences(length):
    mesh = init_device_mesh("cpu", (4,))
    x = values(2, length, 8)
    plain, model = filled(nn.LayerNorm(8)), filled(nn.LayerNorm(8))
    parallelize_module(model, mesh, SequenceParallel())
    part = distribute_tensor(x, mesh, [Shard(1)]).to_local()
    y = model(part)
    assert y.placements == (Shard(1),)
    assert_full(y, plain(x), **CLOSE)
    y.pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    assert_same_gradients(model, plain)
    # What a layer is given of its input counts too, and of an input that is prepared.
    plain, model = filled(nn.Linear(8, 8)), filled(nn.Linear(8, 8))
    parallelize_module(model, mesh, ColwiseParallel(input_layouts=Shard(1), use_local_output=False))
    assert_full(model(part), plain(x), **CLOSE)
    model = parallelize_module(
        nn.Identity(), mesh, PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    )
    assert_full(model(part), x)


@on_ranks()
def test_parts_that_are_no_sequence():
    mesh = init_device_mesh("cpu", (4,))
    model = parallelize_module(nn.LayerNorm(8), mesh, SequenceParallel())
    with pytest.raises(ValueError, match="SequenceParallel.*as torch.chunk splits"):
        model(values(2, 2 + mesh.get_rank(), 8))


@on_ranks()
def test_dropout_along_sequences():
    mesh = init_device_mesh("cpu", (4,))
    model = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel())
    y = model(torch.ones(2, 12, 8))
    assert y.placements == (Shard(1),) and y.shape == (2, 48, 8)
    kept = (y != 0).float().mean().item()
    assert 0.3 < kept < 0.7 and y.max().item() == 2
    model.eval()
    assert_full(model(torch.ones(2, 12, 8)), torch.ones(2, 48, 8))


@on_ranks(2)
def test_sequences_are_tensors():
    model = parallelize_module(nn.LayerNorm(4), init_device_mesh("cpu", (2,)), SequenceParallel())
    with pytest.raises(TypeError, match="the input of SequenceParallel on LayerNorm is list"):
        model([1.0])


# --- inputs and outputs --------------------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return args if len(args) > 1 else args[0] if args else kwargs


@on_ranks()
def test_inputs_are_prepared():
    mesh = init_device_mesh("cpu", (4,))
    part = values(2, 4)
    model = parallelize_module(
        Recorder(), mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    )
    model(part)
    assert_full(model.args[0], part.repeat(4, 1))
    assert model.args[0].placements == (Replicate(),)
    model(distribute_tensor(values(8, 4), mesh, [Shard(1)]))
    assert model.args[0].placements == (Replicate(),)

    layouts = {
        "input_layouts": (Shard(0), None, Replicate()),
        "desired_input_layouts": (Shard(1), None, None),
    }
    for local in (True, False):
        model = parallelize_module(Recorder(), mesh, PrepareModuleInput(**layouts, use_local_output=local))
        model(part, part, part)
        first, second, third = model.args
        assert isinstance(first, DTensor) is not local and first.shape == ((8, 1) if local else (8, 4))
        assert second is part and isinstance(third, DTensor) is not local
        with pytest.raises(ValueError, match="called with 2 positional arguments, but input_layouts has 3"):
            model(part, part)
    with pytest.raises(TypeError, match="argument 0 of Recorder.* is int"):
        model(1, part, part)


@on_ranks()
def test_keyword_inputs_are_prepared():
    mesh = init_device_mesh("cpu", (4,))
    part = values(2, 4)
    style = PrepareModuleInput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        input_kwarg_layouts={"x": Shard(0), "pair": Replicate(), "named": Replicate()},
        desired_input_kwarg_layouts={"x": Replicate(), "pair": Shard(1), "named": Shard(0)},
    )
    model = parallelize_module(Recorder(), mesh, style)
    model(part, x=part, pair=(part, [part]), named={"a": values(4)}, other=part, flag=True)
    assert model.args[0].placements == model.kwargs["x"].placements == (Replicate(),) and model.kwargs[
        "x"
    ].shape == (8, 4)
    first, (second,) = model.kwargs["pair"]
    assert first.placements == second.placements == (Shard(1),) and model.kwargs["named"]["a"].placements == (
        Shard(0),
    )
    assert model.kwargs["other"] is part and model.kwargs["flag"] is True

    only = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0)},
        desired_input_kwarg_layouts={"x": Shard(1)},
        use_local_output=True,
    )
    model = parallelize_module(Recorder(), mesh, only)
    model(part, x=part)
    assert (
        model.args[0] is part
        and model.kwargs["x"].shape == (8, 1)
        and not isinstance(model.kwargs["x"], DTensor)
    )


@on_ranks()
def test_outputs_are_prepared():
    mesh = init_device_mesh("cpu", (4,))
    part = values(2, 4)
    model = parallelize_module(
        Recorder(), mesh, PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    )
    torch.testing.assert_close(model(part), part.repeat(4, 1))
    style = PrepareModuleOutput(
        output_layouts=(Shard(0), None), desired_output_layouts=(Shard(1), None), use_local_output=False
    )
    first, second = parallelize_module(Recorder(), mesh, style)(part, part)
    assert first.placements == (Shard(1),) and second is part
    with pytest.raises(ValueError, match="returned 1 values, but output_layouts has 2"):
        parallelize_module(Recorder(), mesh, style)(part)


@on_ranks()
def test_inputs_and_outputs_are_prepared():
    mesh = init_device_mesh("cpu", (4,))
    for local_input, local_output in itertools.product((True, False), repeat=2):
        style = PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Replicate(),
            use_local_input=local_input,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
            use_local_output=local_output,
        )
        model = parallelize_module(Recorder(), mesh, style)
        y = model(values(2, 4))
        assert isinstance(model.args[0], DTensor) is not local_input and model.args[0].shape == (8, 4)
        assert isinstance(y, DTensor) is not local_output and y.shape == ((8, 1) if local_output else (8, 4))


def test_layouts_that_do_not_fit_are_refused():
    for options, message in (
        ({"input_layouts": Shard(0)}, "both input_layouts and desired_input_layouts"),
        (
            {"input_layouts": (Shard(0), None), "desired_input_layouts": Replicate()},
            "has 2 entries, but desired_input_layouts has 1",
        ),
        (
            {"input_kwarg_layouts": {"x": Shard(0)}, "desired_input_kwarg_layouts": {"y": Shard(0)}},
            r"names \['x'\].* \['y'\]",
        ),
        ({"input_kwarg_layouts": {"x": Shard(0)}}, r"names \['x'\]"),
    ):
        with pytest.raises((ValueError, AssertionError), match=message):
            PrepareModuleInput(**options)
    # torch's type and words, for programs that catch it
    with pytest.raises(
        AssertionError, match="output_layouts and desired_output_layouts should have same length!.* 1 .* 2"
    ):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Shard(0), Shard(1)))


def test_styles_print():
    assert (
        repr(RowwiseParallel())
        == "RowwiseParallel(input_layouts=None, output_layouts=None, use_local_output=True)"
    )
    assert (
        repr(ColwiseParallel(blocks=3))
        == "ColwiseParallel(blocks=3, input_layouts=None, output_layouts=None, use_local_output=True)"
    )
    assert repr(SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"
    assert "desired_output_layouts=(Shard(dim=1),)" in repr(
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    )


# --- plans ---------------------------------------------------------------------------------------------------------------------


def layers() -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(MLP() for _ in range(3))
    model.extra = nn.ModuleDict({"up_a": nn.Linear(8, 8), "up_b": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
    return filled(model)


@on_ranks(1)  # pytest.warns is not for several threads
def test_names_with_wildcards():
    mesh = init_device_mesh("cpu", (1,))
    model = layers()
    plan = {
        "layers.*.up": ColwiseParallel(),
        "layers.[01].down": RowwiseParallel(),
        "ex*.up_?": ColwiseParallel(),
    }
    assert parallelize_module(model, mesh, plan) is model
    placed = {
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and name.endswith("weight")
    }
    assert placed == {
        *(f"layers.{n}.up.weight" for n in range(3)),
        *(f"layers.{n}.down.weight" for n in range(2)),
        "extra.up_a.weight",
        "extra.up_b.weight",
    }
    # A wildcard stands for one component.
    model = layers()
    with pytest.warns(
        UserWarning, match=r"'\*.up' fits no submodule .*nothing is named 'up' among .*layers.0"
    ):
        parallelize_module(model, mesh, {"*.up": ColwiseParallel()})
    # Only some of what fits the beginning fits the rest.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(layers(), mesh, {"*.norm": SequenceParallel(), "": PrepareModuleInput()})


@on_ranks(1)  # pytest.warns is not for several threads
def test_plans_that_do_nothing_or_are_wrong():
    mesh = init_device_mesh("cpu", (1,))
    with pytest.warns(UserWarning, match="no plan"):
        parallelize_module(MLP(), mesh)
    with pytest.warns(
        UserWarning,
        match="'layer.up' fits no submodule of MLP and is skipped: nothing is named 'layer' among down, up",
    ):
        model = parallelize_module(MLP(), mesh, {"layer.up": ColwiseParallel(), "up": ColwiseParallel()})
    assert model.up.weight.placements == (Shard(0),)
    with pytest.raises(TypeError, match="got list"):
        parallelize_module(MLP(), mesh, [ColwiseParallel()])
    with pytest.raises(TypeError, match="for 'up'; expected a ParallelStyle"):
        parallelize_module(MLP(), mesh, {"up": ColwiseParallel})
    with pytest.raises(
        NotImplementedError, match="ColwiseParallel: does not know how to shard a MLP; it knows Linear, "
    ):
        parallelize_module(MLP(), mesh, ColwiseParallel())
    with mesh:
        assert (
            parallelize_module(MLP(), parallelize_plan={"up": ColwiseParallel()}).up.weight.device_mesh
            == mesh
        )


@on_ranks(2)
def test_a_style_of_ones_own():
    class Twice(ParallelStyle):
        def _apply(self, module, device_mesh):
            module.register_forward_hook(lambda each, args, output: output * 2)
            return distribute_module(module, device_mesh)

    mesh = init_device_mesh("cpu", (2,))
    plain = filled(nn.Linear(4, 4))
    model = parallelize_module(filled(nn.Linear(4, 4)), mesh, Twice())
    assert_full(model(distribute_tensor(values(3, 4), mesh)), plain(values(3, 4)) * 2)


# --- meshes of several dims ----------------------------------------------------------------------------------------------------


@on_ranks()
def test_a_mesh_of_two_dims():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = filled(MLP()), filled(MLP())
    options = {"use_local_output": False}
    parallelize_module(model, mesh, {"up": ColwiseParallel(**options), "down": RowwiseParallel(**options)})
    assert model.up.weight.placements == (Replicate(), Shard(0)) and model.down.bias.placements == (
        Replicate(),
        Replicate(),
    )
    x = values(6, 5, 8)
    with Collectives(mesh) as forward:
        y = model(distribute_tensor(x, mesh, [Shard(0), Replicate()]))
    assert forward == 1 and y.placements == (Shard(0), Replicate())
    assert_full(y, plain(x), **CLOSE)
    y.pow(2).mean().backward()
    plain(x).pow(2).mean().backward()
    assert_same_gradients(model, plain)
    with pytest.raises(
        ValueError, match=r"is a plain tensor of shape .* parallelized on mesh\(dp=2, tp=2\).*mesh\[\"tp\"\]"
    ):
        model(x)
    with pytest.raises(ValueError, match="is on .*, but the module was parallelized on"):
        model(distribute_tensor(x, mesh["tp"]))


@on_ranks()
def test_a_slice_of_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = filled(MLP())
    model = parallelize_module(
        filled(MLP()), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    x = values(6, 8).chunk(2)[mesh.get_local_rank("dp")]
    torch.testing.assert_close(model(x), plain(x), **CLOSE)


# --- input_reshard -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distributed", [True, False])
@on_ranks()
def test_inputs_are_kept_in_shards(distributed):
    mesh = init_device_mesh("cpu", (4,))
    kept = []
    plain, model = filled(MLP()), filled(MLP())
    local = {"use_local_output": not distributed}
    parallelize_module(model, mesh, {"up": ColwiseParallel(**local), "down": RowwiseParallel(**local)})
    assert input_reshard(model, mesh, None) is model and not model._forward_pre_hooks
    assert input_reshard(model, mesh, 0) is model
    x = values(8, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(distribute_tensor(x, mesh) if distributed else x)
    assert not kept  # ours are the innermost hooks
    with Collectives(mesh) as backward:
        y.pow(2).sum().backward()
    assert backward == 1  # to have the input for the gradient of up.weight; its own is not asked for
    plain(x).pow(2).sum().backward()
    assert_same_gradients(model, plain)
    with pytest.raises(ValueError, match="expected a mesh of one dim"):
        input_reshard(model, init_device_mesh("cpu", (2, 2)), 0)
