"""Where shards lie: the functions of ``torch.distributed.tensor._utils``, and methods of torch's placements, that libraries use."""

from collections.abc import Sequence
from typing import Any

import torch

from tessera import _C
from tessera._C import DeviceMesh, Partial, Placement, Shard, _StridedShard


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The local shape on this rank of a tensor of that shape, and where it begins in the global tensor."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (0,), ()
    shape, offset = _C.local_shape_and_global_offset(global_shape, mesh.shape, placements, coordinate)
    return tuple(shape), () if skip_offset else tuple(offset)


def _local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
    """The size and the offset of one of `num_chunks` chunks of a dim, as by ``torch.chunk``."""
    (size,), (offset,) = _C.local_shape_and_global_offset([curr_local_size], [num_chunks], [Shard(0)], [rank])
    return size, offset


def _strided_size_and_offset(
    self: _StridedShard, curr_local_size: int, num_chunks: int, rank: int, offset_mode: int = 0
) -> tuple[int, Any]:
    """How many elements of a dim the rank has, and the first of them (-1 if it has none); with mode 1 all of them, with 2 none."""
    shards = _split(
        _StridedShard(0, split_factor=self.split_factor), torch.arange(curr_local_size), num_chunks
    )
    indices = shards[rank].tolist()
    offset = (indices[0] if indices else -1) if offset_mode == 0 else indices if offset_mode == 1 else None
    return len(indices), offset


def _split(self: Shard | _StridedShard, tensor: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
    """What each of the ranks gets of the tensor."""
    parts = getattr(self, "split_factor", 1)
    chunks = [_chunk(part, num_chunks, self.dim) for part in _chunk(tensor, parts, self.dim)]
    return [
        torch.cat(of_rank, self.dim) if parts > 1 else of_rank[0] for of_rank in zip(*chunks, strict=True)
    ]


def _chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    chunks = list(tensor.chunk(count, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (count - len(chunks))


def _split_tensor(
    self: Shard | _StridedShard,
    tensor: torch.Tensor,
    num_chunks: int,
    *,
    with_padding: bool = True,
    contiguous: bool = True,
) -> tuple[list[torch.Tensor], list[int]]:
    """What each of `num_chunks` ranks gets of a plain tensor, and by how much each is padded.

    ``with_padding``: pad them with zeros to one size, except those of a strided shard, of which only the padding is told.
    """
    shards = _split(self, tensor, num_chunks)
    pads: list[int] = []
    if with_padding:
        largest = max(shard.size(self.dim) for shard in shards)
        pads = [_get_shard_pad_size(largest, shard, self.dim) for shard in shards]
        if isinstance(self, Shard):
            shards = [_padded(shard, self.dim, pad) for shard, pad in zip(shards, pads, strict=True)]
    return [shard.contiguous() for shard in shards] if contiguous else shards, pads


def _padded(tensor: torch.Tensor, dim: int, pad: int) -> torch.Tensor:
    if pad == 0:
        return tensor
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.ndim - dim % tensor.ndim - 1) + [0, pad])


def _get_shard_pad_size(full_size: int, local_tensor: torch.Tensor, dim: int) -> int:
    """By how much a shard is smaller than the largest."""
    return full_size - local_tensor.size(dim)


def _get_root_mesh_dim(self: DeviceMesh) -> int | None:
    """Which dim of its root a slice of one dim is; None for the root itself."""
    root = self._get_root_mesh()
    names = root.mesh_dim_names or ()
    is_slice = self.ndim == 1 and self != root and self.mesh_dim_names is not None
    return names.index(self.mesh_dim_names[0]) if is_slice and self.mesh_dim_names[0] in names else None  # type: ignore[index]


def install() -> None:
    Partial.ALL_REDUCE_OPS = ("sum", "avg", "min", "max", "product")
    Partial.LINEAR_REDUCE_OPS = ("sum", "avg")
    DeviceMesh._get_root_mesh_dim = _get_root_mesh_dim  # type: ignore[method-assign]
    DeviceMesh._dim_group_names = property(  # type: ignore[assignment,method-assign]
        lambda self: [group.group_name for group in self.get_all_groups()]
    )
    for placement in (Shard, _StridedShard):
        placement._split_tensor = _split_tensor  # type: ignore[method-assign]
    Shard.local_shard_size_and_offset = staticmethod(_local_shard_size_and_offset)  # type: ignore[method-assign]
    Shard._local_shard_size_and_offset = staticmethod(_local_shard_size_and_offset)  # type: ignore[method-assign]
    Shard._get_shard_pad_size = staticmethod(_get_shard_pad_size)  # type: ignore[method-assign]
    Shard._custom_chunk = staticmethod(_chunk)  # type: ignore[method-assign]
    _StridedShard.local_shard_size_and_offset = _strided_size_and_offset  # type: ignore[method-assign]
    _StridedShard._local_shard_size_and_offset = _strided_size_and_offset  # type: ignore[method-assign]
