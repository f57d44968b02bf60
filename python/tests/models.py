"""Models that several tests train, and how."""

from collections.abc import Callable
from typing import Any

import torch
from ranks import values
from torch import nn


class MLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=bias)
        self.down = nn.Linear(16, 8, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Conv1D(nn.Module):
    """As that of transformers: a linear layer whose weight is transposed."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(inputs, outputs)),
            nn.Parameter(torch.zeros(outputs)),
        )
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


def filled(module: nn.Module, scale: float = 0.3) -> nn.Module:
    """With the same small numbers on every rank, about one where all were one: the weights of norms."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_((parameter == 1).all() + values(*parameter.shape, seed=number) * scale)
    return module


def train(
    model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], steps: int = 3, **optimiser: Any
) -> list[float]:
    """The losses of some steps. AdamW's eps is large, or it would blow up gradients that are noise, as of a bias of keys."""
    optimiser = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "eps": 1e-4, **optimiser})
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses
