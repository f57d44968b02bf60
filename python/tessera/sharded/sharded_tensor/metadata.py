"""What is known of a sharded tensor without its data."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tessera.sharded.metadata import ShardMetadata


@dataclass
class TensorProperties:
    """What all shards have in common."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> "TensorProperties":
        """Those of a tensor."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            pin_memory=tensor.is_pinned(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        name = str(self.memory_format).removeprefix("torch.")
        return rebuild_properties, (self.dtype, self.layout, self.requires_grad, name, self.pin_memory)


def rebuild_properties(
    dtype: torch.dtype, layout: torch.layout, requires_grad: bool, memory_format: str, pin_memory: bool
) -> TensorProperties:
    """What pickles call. Its name and arguments are a format: do not change them."""
    return TensorProperties(dtype, layout, requires_grad, getattr(torch, memory_format), pin_memory)


@dataclass
class ShardedTensorMetadata:
    """All shards of a tensor, on whatever rank."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)


torch.serialization.add_safe_globals([TensorProperties, ShardedTensorMetadata, rebuild_properties])
