"""Mixtures of experts: tokens go by all-to-all to the ranks that have their experts. As on one device."""

import pytest
import torch
from models import filled
from ranks import on_ranks, values
from tessera.parallel import (
    ExpertParallel,
    all_to_all_single,
    exchange_sizes,
    parallelize_module,
    replicate,
)

import tessera
from tessera import DTensor, Shard, init_device_mesh
from tessera.debug import CommDebugMode

FAMILIES = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 8, "moe_intermediate_size": 32},
}
VOCABULARY = 65


def make(family: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None, num_experts_per_tok=2,
        experts_implementation="eager", **FAMILIES[family],
    )  # fmt: skip
    return filled(kind(config)).to(torch.float64).eval()


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family, shape):
    """Each rank has some of the sequences and some of the experts; the loss is that of all sequences."""
    ranks = torch.Size(shape).numel()
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
    reference = make(family)
    output = reference(input_ids=tokens, labels=tokens)
    output.loss.backward()
    models = [make(family) for _ in range(ranks)]

    def main():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")[-len(shape) :])
        model = models[tessera.get_rank()]
        parallelize_module(model, mesh["ep"], {"model.layers.*.mlp.experts": ExpertParallel()})
        if len(shape) == 1:
            replicate(model, mesh)
        else:
            replicate(model, mesh["dp"])  # experts too
            experts = [each for name, each in model.named_modules() if name.endswith(".experts")]
            of_experts = {id(parameter) for each in experts for parameter in each.parameters()}
            others = [each for each in model.parameters() if id(each) not in of_experts]
        mine = tokens.chunk(ranks)[tessera.get_rank()]
        with CommDebugMode() as mode:
            ours = model(input_ids=mine, labels=mine)
        kinds = {str(each) for each in mode.get_comm_counts()}
        assert kinds and all("alltoall" in each.replace("_", "") for each in kinds), kinds
        torch.testing.assert_close(
            ours.logits.detach(), output.logits.detach().chunk(ranks)[tessera.get_rank()]
        )
        ours.loss.backward()
        if len(shape) == 2:  # what every rank has is averaged along "ep" too
            for parameter in others:
                summed = DTensor.from_local(parameter.grad, mesh["ep"], [tessera.Partial("avg")])
                parameter.grad = summed.full_tensor()
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            gradient = parameter.grad
            if isinstance(parameter, DTensor):
                assert ".experts." in name and parameter.placements == (Shard(0),)
                gradient = gradient.full_tensor()
            scale = expected.grad.abs().max().item()
            torch.testing.assert_close(gradient, expected.grad, rtol=1e-6, atol=1e-7 * scale, msg=name)

    tessera.run(ranks, main, timeout=120)


@on_ranks()
def test_all_to_all_single():
    mesh = init_device_mesh("cpu", (4,))
    me = tessera.get_rank()
    counts = torch.randint(0, 4, (4, 4), generator=torch.Generator().manual_seed(3))
    rows = values(int(counts[me].sum()), 3, seed=me).requires_grad_()
    sent, received = counts[me].tolist(), counts[:, me].tolist()
    assert exchange_sizes(sent, mesh) == received
    result = all_to_all_single(rows, received, sent, mesh)
    expected = [values(int(counts[r].sum()), 3, seed=r).split(counts[r].tolist())[me] for r in range(4)]
    assert torch.equal(result.detach(), torch.cat(expected))
    (result * (me + 1)).sum().backward()
    factors = torch.arange(1.0, 5.0).repeat_interleave(counts[me])
    assert torch.equal(rows.grad, factors[:, None].expand(-1, 3))
    even = all_to_all_single(torch.full((4,), me), None, None, mesh)
    assert even.tolist() == [0, 1, 2, 3]


@on_ranks()
def test_errors():
    mesh = init_device_mesh("cpu", (4,))

    class Experts(torch.nn.Module):
        def __init__(self, count):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(count, 2))

    with pytest.raises(ValueError, match="6 experts of Experts cannot be shared evenly among 4 ranks"):
        parallelize_module(Experts(6), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="dim 0 is the experts"):
        parallelize_module(torch.nn.Sequential(torch.nn.Linear(2, 4)), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="mesh of one dim"):
        parallelize_module(Experts(4), init_device_mesh("cpu", (2, 2)), ExpertParallel())
    with pytest.raises(ValueError, match="local_map"):
        all_to_all_single(DTensor.from_local(torch.ones(4), mesh, [Shard(0)]), None, None, mesh)
