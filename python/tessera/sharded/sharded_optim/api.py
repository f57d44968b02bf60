"""Optimisers on local shards."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim

from tessera.sharded.sharded_tensor import ShardedTensor


def _tensors(named_params: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    result: list[torch.Tensor] = []
    for value in named_params.values():
        if isinstance(value, ShardedTensor):
            result.extend(shard.tensor for shard in value.local_shards())
        else:
            result.append(value)
    return result


class ShardedOptimizer(optim.Optimizer):
    """Runs an optimiser of torch on plain parameters and on the local shards of sharded ones: element by element that is the same as on
    the global tensor.

        ShardedOptimizer(dict(named_params_with_sharded_tensor(model)), torch.optim.SGD, lr=0.1)
    """

    def __init__(
        self,
        named_params: Mapping[str, torch.Tensor],
        optimizer_class: type[optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        self.named_params = dict(named_params)
        # Not empty, which optimisers refuse: a rank may have no shards.
        tensors = _tensors(self.named_params) or [torch.nn.Parameter(torch.empty(0))]
        self._optim = optimizer_class(tensors, *optimizer_args, **optimizer_kwargs)
        self.defaults = self._optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimiser, whose parameters are the local tensors."""
        return self._optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """By local tensor."""
        return self._optim.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``set_to_none``: forget the gradients instead of making them zero."""
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, on this rank's local tensors. Not collective."""
        return self._optim.step(closure) if closure is not None else self._optim.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's local shards."""
        return self._optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """On the same rank and parameters."""
        self._optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """``param_group["params"]``: more parameters, by name."""
        named = dict(param_group["params"])
        self._optim.add_param_group({**param_group, "params": _tensors(named)})
        self.named_params.update(named)
