"""Models of torch.nn modules, tensor-parallel by hand-placed parameters, against one device."""

import pytest
import torch
from ranks import assert_full, on_ranks, values
from torch import nn

import tessera
from tessera import Replicate, Shard


class Block(nn.Module):
    """A transformer block as one writes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # A bias of the keys has no effect, so that its gradients are noise, which AdamW would blow up.
        self.query, self.key, self.value = (
            nn.Linear(width, width, bias=bias) for bias in (True, False, True)
        )
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        query, key, value = (
            projection(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.blocks = nn.Sequential(Block(16, 4), Block(16, 4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 17, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def make_model() -> Model:
    model = Model()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(values(*parameter.shape, seed=number) * 0.2)
    return model


def place(model: Model, mesh: tessera.DeviceMesh) -> None:
    """Along the last mesh dim: columns of what goes in, rows of what comes out; all else replicated."""
    columns, rows = {"query", "key", "value", "up"}, {"out", "down"}
    for name, module in model.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            last = Replicate()
            if leaf in columns or leaf == "head":
                last = Shard(0)
            elif leaf in rows and parameter_name == "weight":
                last = Shard(1)
            placements = [Replicate()] * (mesh.ndim - 1) + [last]
            setattr(
                module,
                parameter_name,
                nn.Parameter(tessera.distribute_tensor(parameter.data, mesh, placements)),
            )


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("way", ["for-loop", "foreach"])
def test_ten_steps_equal_one_device(shape, way):
    tokens = torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def train(model, inputs, targets):
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=way == "foreach")
        losses = []
        for _ in range(10):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            losses.append(loss.item())
        return losses

    plain = make_model()
    expected = train(plain, inputs, targets)
    assert expected[-1] < 0.9 * expected[0]

    @on_ranks()
    def parallel():
        mesh = tessera.init_device_mesh("cpu", shape)
        model = make_model()
        place(model, mesh)
        data = [Shard(0), Replicate()] if mesh.ndim == 2 else [Replicate()]
        losses = train(model, *(tessera.distribute_tensor(t, mesh, data) for t in (inputs, targets)))
        assert losses == pytest.approx(expected, rel=1e-4)
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert_full(ours.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)

    parallel()
