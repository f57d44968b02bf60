"""What ``DTensor._spec`` gives: a read-only description of a distributed tensor, with the fields of torch's DTensorSpec."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tessera import _C
from tessera._C import DeviceMesh, Placement, Shard, _StridedShard

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import TensorMeta


@dataclass(unsafe_hash=True)
class DTensorSpec:
    """The mesh, the placements and the global shape, strides and dtype of a distributed tensor. Equal ones hash alike.

    It is read-only: what is assigned must be what it says already.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    tensor_meta: "TensorMeta"

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dataclass_fields__ and name not in self.__dict__:
            super().__setattr__(name, value)
        elif getattr(self, name) != value:
            raise AttributeError(
                f"A _spec only describes a tensor: its {name} is {getattr(self, name)}, and cannot become {value}. Redistribute the tensor."
            )

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.mesh

    @property
    def shape(self) -> torch.Size:
        return self.tensor_meta.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self.tensor_meta.stride

    @property
    def ndim(self) -> int:
        return len(self.tensor_meta.shape)

    def _shards(self) -> list[tuple[int, int]]:
        """The mesh dims that shard, each with the tensor dim that it shards."""
        return [
            (mesh_dim, placement.dim)
            for mesh_dim, placement in enumerate(self.placements)
            if isinstance(placement, (Shard, _StridedShard))
        ]

    @property
    def num_shards(self) -> int:
        """How many shards the tensor has."""
        return math.prod(self.mesh.size(mesh_dim) for mesh_dim, _ in self._shards())

    @property
    def num_shards_map(self) -> list[int]:
        """How many shards each tensor dim has."""
        result = [1] * self.ndim
        for mesh_dim, dim in self._shards():
            result[dim] *= self.mesh.size(mesh_dim)
        return result

    @property
    def dim_map(self) -> list[int]:
        """The mesh dim that shards each tensor dim, or -1. An error if several do."""
        result = [-1] * self.ndim
        for mesh_dim, dim in self._shards():
            if result[dim] != -1:
                raise ValueError(
                    f"Tensor dim {dim} is sharded on mesh dims {result[dim]} and {mesh_dim}: dim_map cannot say so; read placements."
                )
            result[dim] = mesh_dim
        return result

    @property
    def sums(self) -> list[int]:
        """The mesh dims on which the tensor has yet to be reduced."""
        return [mesh_dim for mesh_dim, placement in enumerate(self.placements) if placement.is_partial()]

    def _decoded_order(self) -> dict[int, list[int]] | None:
        """The mesh dims that shard each tensor dim, in the order that strided shards stand for; None if they stand for none."""
        result: dict[int, list[int]] = {}
        for mesh_dim, dim in reversed(self._shards()):
            order = result.setdefault(dim, [])
            factor = getattr(self.placements[mesh_dim], "split_factor", 1)
            products = [
                math.prod(self.mesh.size(each) for each in order[:at]) for at in range(len(order) + 1)
            ]
            if factor not in products:
                return None
            order.insert(products.index(factor), mesh_dim)
        return result

    @property
    def use_strided_shard_as_shard_order(self) -> bool:
        """Whether there are strided shards, and these only say that mesh dims shard in another order than from left to right."""
        has_strided = any(isinstance(each, _StridedShard) for each in self.placements)
        return has_strided and self._decoded_order() is not None

    @property
    def shard_order(self) -> tuple[Any, ...]:
        """For each tensor dim that is sharded: the mesh dims that do so, in their order."""
        order = self._decoded_order()
        if order is None:
            order = {}
            for mesh_dim, dim in self._shards():
                order.setdefault(dim, []).append(mesh_dim)
        return _entries(order.items())

    def is_replicated(self) -> bool:
        return all(placement.is_replicate() for placement in self.placements)

    def is_sharded(self) -> bool:
        return bool(self._shards())

    def __str__(self) -> str:
        placed = "".join(str(each) for each in self.placements)
        return f"Spec({placed} on {tuple(self.shape)}, {self.mesh})"


def _entries(order: Iterable[tuple[int, list[int]]]) -> tuple[Any, ...]:
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    return tuple(ShardOrderEntry(dim, tuple(mesh_dims)) for dim, mesh_dims in sorted(order))


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    from torch.distributed.tensor._dtensor_spec import TensorMeta  # it takes long, and few ask

    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensorSpec(_C.device_mesh(tensor), _C.placements(tensor), meta)
