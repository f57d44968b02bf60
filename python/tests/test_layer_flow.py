"""Each layer that the styles know: values and gradients as on one device, placements and the number of collectives as tests/nn/layer_flow.txt says,
which the modules of C++ are compared with too."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import Conv1D, filled
from ranks import Collectives, assert_full, on_ranks, values
from tessera.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch import nn

import tessera
from tessera import _C, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

TABLE = Path(__file__).parents[2] / "tests" / "nn" / "layer_flow.txt"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
INDICES = (torch.arange(12) * 5 % 8).view(3, 4)

LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "linear": (lambda: nn.Linear(6, 8), values(4, 6)),
    "linear_transposed": (lambda: Conv1D(8, 6), values(4, 6)),
    "embedding": (lambda: nn.Embedding(8, 6), INDICES),
    "embedding_bag": (lambda: nn.EmbeddingBag(8, 6), INDICES),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), values(2, 4, 5)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), values(2, 4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3), values(2, 4, 3, 3, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), values(2, 4, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), values(2, 4, 5, 5)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 6, 3), values(2, 4, 3, 3, 3)),
    "multihead_attention": (lambda: nn.MultiheadAttention(8, 4), values(3, 2, 8)),
}
LINES = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]


def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, x, x, need_weights=False)[0] if isinstance(module, nn.MultiheadAttention) else module(x)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


def placement_of(tensor: torch.Tensor) -> str:
    return _C.flatten(tensor)[1].partition("]")[0].lstrip("[") if isinstance(tensor, DTensor) else "plain"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(":")[0].replace(" ", "-"))
@on_ranks(2)
def test_layers_flow_as_the_table_says(line):
    name, style, flow = line.partition(":")[0].split()
    local = flow == "local"
    make, x = LAYERS[name]
    plain, module = filled(make()), filled(make())
    expected_input = leaf(x)
    expected = forward(plain, expected_input)
    weights = values(*expected.shape, seed=3)
    (expected * weights).sum().backward()

    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(module, mesh, STYLES[style](use_local_output=local))
    plan = _C.layer_plan(style, name.removesuffix("_bag"), 1)
    # A plain input is the local tensor of what the layer needs.
    given = distribute_tensor(leaf(x), mesh, [plan.input if local else Replicate()])
    if local:
        given = leaf(given.to_local().detach())
    with Collectives(mesh) as in_forward:
        output = forward(module, given)
    distributed = DTensor.from_local(output, mesh, [plan.output]) if local else output
    assert_full(distributed.detach(), expected.detach(), **CLOSE)
    weight = distribute_tensor(weights, mesh, distributed.placements)
    loss = (output * (weight.to_local() if local else weight)).sum()
    with Collectives(mesh) as in_backward:
        loss.backward()
    gradients = {}
    if given.requires_grad:
        gradients["input"] = given.grad
        gradient = DTensor.from_local(given.grad, mesh, [plan.input]) if local else given.grad
        assert_full(gradient, expected_input.grad, **CLOSE)
    for (path, parameter), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        gradients[path] = parameter.grad
        assert_full(parameter.grad, other.grad, **CLOSE)
    counts = [re.sub(r"\D", "", repr(count)) for count in (in_forward, in_backward)]
    actual = (
        f"{name} {style} {flow}: output {placement_of(output)}, collectives {counts[0]} forward, {counts[1]} backward; gradients: "
        + ", ".join(f"{path} {placement_of(gradient)}" for path, gradient in gradients.items())
    )
    assert actual == line


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@on_ranks(3)
def test_bags_with_offsets(style):
    mesh = init_device_mesh("cpu", (3,))
    arguments = {"offsets": torch.tensor([0, 3, 3, 10]), "per_sample_weights": values(12)}
    indices = torch.arange(12) * 5 % 7
    plain, module = (filled(nn.EmbeddingBag(7, 6, mode="sum")) for _ in range(2))
    parallelize_module(module, mesh, style(output_layouts=Replicate()))
    y, expected = module(indices, **arguments), plain(indices, **arguments)
    torch.testing.assert_close(y, expected, **CLOSE)
    y.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    assert_full(module.weight.grad, plain.weight.grad, **CLOSE)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"kdim": 6, "vdim": 6}, {"add_bias_kv": True}, {"bias": False}]
)
@on_ranks(2)
def test_attention(options, local):
    mesh = init_device_mesh("cpu", (2,))
    plain, module = (filled(nn.MultiheadAttention(8, 4, **options)) for _ in range(2))
    parallelize_module(module, mesh, ColwiseParallel(use_local_output=local))
    query = values(3, 2, 8)
    memory = values(3, 2, 6, seed=1) if "kdim" in options else values(3, 2, 8, seed=1)
    size = 2 if "batch_first" in options else 3
    mask = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)
    for arguments in (
        {"key": memory, "value": memory, "attn_mask": mask},
        {"key": memory, "value": memory, "need_weights": False},
        {"key": memory, "value": memory, "average_attn_weights": False},
        *([] if "kdim" in options else [{"key": query, "value": query}]),
    ):
        plain.zero_grad(), module.zero_grad()
        expected, expected_weights = plain(query, **arguments)
        actual, weights = (
            module(query, **arguments) if local else module(distribute_tensor(query, mesh), **arguments)
        )
        for ours, theirs in ((actual, expected), (weights, expected_weights)):
            if theirs is not None:
                assert isinstance(ours, DTensor) is not local
                torch.testing.assert_close(ours if local else ours.full_tensor(), theirs, **CLOSE)
        actual.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                ours.grad.full_tensor(), theirs.grad, **CLOSE, msg=lambda text: f"{name}: {text}"
            )
    with torch.no_grad():
        actual, expected = (each.eval()(query, memory, memory)[0] for each in (module, plain))
        torch.testing.assert_close(actual if local else actual.full_tensor(), expected, **CLOSE)


@on_ranks(3)
def test_heads_are_divided_evenly():
    with pytest.raises(ValueError, match="4 heads of a MultiheadAttention .* 3 ranks"):
        parallelize_module(nn.MultiheadAttention(8, 4), init_device_mesh("cpu", (3,)), ColwiseParallel())
    with pytest.raises(
        NotImplementedError, match="RowwiseParallel: does not know how to shard a MultiheadAttention"
    ):
        parallelize_module(nn.MultiheadAttention(9, 3), init_device_mesh("cpu", (3,)), RowwiseParallel())
    with pytest.raises(ValueError, match="blocks .* no meaning for multihead_attention"):
        parallelize_module(
            nn.MultiheadAttention(9, 3), init_device_mesh("cpu", (3,)), ColwiseParallel(blocks=3)
        )


@on_ranks(2)
def test_an_encoder_layer():
    mesh = init_device_mesh("cpu", (2,))
    plain, module = (
        filled(nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)) for _ in range(2)
    )
    parallelize_module(
        module,
        mesh,
        {"self_attn": ColwiseParallel(), "linear1": ColwiseParallel(), "linear2": RowwiseParallel()},
    )
    x = values(2, 5, 8)
    torch.testing.assert_close(module(x), plain(x), **CLOSE)
    module(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(gradient, theirs.grad, **CLOSE, msg=lambda text: f"{name}: {text}")
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), plain.eval()(x), **CLOSE)


@on_ranks(2)
def test_the_gradient_of_an_input_is_reduced_where_the_layer_begins():
    mesh = init_device_mesh("cpu", (2,))
    seen = []
    first, second = filled(nn.Linear(8, 8)), filled(nn.Linear(8, 12))
    tessera.distribute_module(first, mesh)
    parallelize_module(second, mesh, ColwiseParallel(use_local_output=False))
    x = first(distribute_tensor(values(4, 8), mesh))
    x.register_hook(lambda gradient: seen.append(gradient.placements))
    y = second(x)
    with Collectives(mesh) as backward:
        y.pow(2).sum().backward()
    assert seen == [(Replicate(),)] and backward == 1
    assert first.weight.grad.placements == (Replicate(),)
    # One that comes sharded is gathered, and its gradient scattered.
    x = distribute_tensor(values(4, 8), mesh, [Shard(0)]).requires_grad_()
    y = second(x)
    with Collectives(mesh) as backward:
        y.pow(2).sum().backward()
    assert x.grad.placements == (Shard(0),) and backward == 1


@on_ranks(2)
def test_inputs_by_name():
    mesh = init_device_mesh("cpu", (2,))
    plain, module = filled(nn.Linear(8, 12)), filled(nn.Linear(8, 12))
    parallelize_module(module, mesh, ColwiseParallel(output_layouts=Replicate()))
    torch.testing.assert_close(module(input=values(4, 8)), plain(values(4, 8)), **CLOSE)
    with pytest.raises(
        TypeError, match="ColwiseParallel: argument 'input' of Linear is NoneType; expected a tensor"
    ):
        module()
