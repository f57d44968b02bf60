"""Where shards lie: the functions of ``torch.distributed.tensor._utils``, and methods of torch's placements and meshes, that libraries use."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessera import _C, _functional
from tessera._C import DeviceMesh, Partial, Placement, Replicate, Shard, _StridedShard


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The local shape on this rank of a tensor of that shape, and where it begins in the global tensor."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (0,), ()
    shape, offset = _C.local_shape_and_global_offset(global_shape, mesh.shape, placements, coordinate)
    return tuple(shape), () if skip_offset else tuple(offset)


def _compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate_of: Callable[[int], int],
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same for the rank that is at ``coordinate_of(mesh_dim)`` of a mesh of that shape."""
    coordinate = [coordinate_of(mesh_dim) for mesh_dim in range(len(mesh_shape))]
    shape, offset = _C.local_shape_and_global_offset(global_shape, mesh_shape, placements, coordinate)
    return tuple(shape), () if skip_offset else tuple(offset)


def _shards(placements: Sequence[Placement], mesh: DeviceMesh) -> list[tuple[int, int]]:
    """The tensor dims that are sharded, each with the number of shards, by mesh dim."""
    for placement in placements:
        if not isinstance(placement, (Shard, _StridedShard, Replicate, Partial)):
            raise RuntimeError(f"placement type {type(placement)} not supported!")
    return [
        (placement.dim, mesh.size(mesh_dim))
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]


def compute_global_tensor_info(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """The global shape and strides, if every rank holds as much as this one does in ``tensor``."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    for dim, shards in _shards(placements, mesh):
        shape[dim] *= shards
        strides = [
            stride * shards if other != dim and stride >= strides[dim] else stride
            for other, stride in enumerate(strides)
        ]
    return shape, strides


def compute_local_tensor_info(
    global_tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """The local shape and strides of a tensor that is sharded evenly."""
    shape, strides = list(global_tensor.shape), list(global_tensor.stride())
    for dim, shards in _shards(placements, mesh):
        if shape[dim] % shards != 0:
            raise AssertionError(f"Global dim {shape[dim]} not divisible by mesh size {shards}")
        shape[dim] //= shards
        strides = [
            stride // shards if other != dim and stride >= strides[dim] * shards else stride
            for other, stride in enumerate(strides)
        ]
    return shape, strides


def compute_global_tensor_shape(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Size:
    """The global shape, of local ones that may differ in the sharded dim, on a mesh of one dim. All ranks must call it."""
    if len(placements) != 1:
        raise NotImplementedError("compute_global_tensor_shape only supports 1 placement for now.")
    if mesh.ndim != 1:
        raise RuntimeError(
            f"Expected one placement per mesh dim, but found 1 placement and {mesh.ndim} mesh dims."
        )
    if isinstance(placements[0], Replicate):
        return shape
    if not isinstance(placements[0], Shard):
        raise NotImplementedError(f"Placement type {type(placements[0])} not supported.")
    mine = torch.tensor(list(shape), device=mesh.device_type).unsqueeze(0)
    all_shapes = _C.full_tensor(
        _C.from_local(mine, mesh, [Shard(0)], False, [mesh.size(), len(shape)], None, None), None
    )
    dim = placements[0].dim
    result = list(shape)
    result[dim] = int(all_shapes[:, dim].sum())
    if any(bool((all_shapes[:, other] != shape[other]).any()) for other in range(len(shape)) if other != dim):
        raise RuntimeError("Non-sharded dimensions should have identical size across ranks.")
    return torch.Size(result)


def compute_local_stride(global_stride: Sequence[int], local_shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a local tensor of that shape whose dims lie in memory in the order of the global tensor's."""
    result, step = [0] * len(local_shape), 1
    # From the inside out; of equal strides the last dim is the innermost.
    for dim in sorted(range(len(local_shape)), key=lambda each: (global_stride[each], -each)):
        result[dim] = step
        step *= local_shape[dim]
    return tuple(result)


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


def _select_split_tensor(
    self: Shard | _StridedShard,
    tensor: torch.Tensor,
    num_chunks: int,
    index: int,
    *,
    with_padding: bool = True,
    contiguous: bool = True,
    clone: bool = True,
) -> torch.Tensor:
    """What rank ``index`` gets of what _split_tensor gives to all."""
    shard = _split_tensor(self, tensor, num_chunks, with_padding=with_padding, contiguous=False)[0][index]
    return shard.clone() if clone else shard.contiguous() if contiguous else shard


def _replicate_to_shard(
    self: Shard | _StridedShard, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int
) -> torch.Tensor:
    """The shard at that index, of a tensor that all ranks along the mesh dim have."""
    return _select_split_tensor(self, local_tensor, mesh.size(mesh_dim), shard_index, with_padding=False)


def _to_replicate_tensor(
    self: Shard | _StridedShard,
    local_tensor: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int,
    current_logical_shape: Sequence[int],
) -> torch.Tensor:
    """The tensor of that shape of which each rank along the mesh dim has a shard. All of them must call it."""
    from torch.distributed import _functional_collectives as collectives

    along = _StridedShard(0, split_factor=getattr(self, "split_factor", 1))
    held = _split(along, torch.arange(current_logical_shape[self.dim]), mesh.size(mesh_dim))
    padded = _padded(local_tensor, self.dim, max(map(len, held)) - local_tensor.size(self.dim))
    gathered = collectives.all_gather_single(padded.contiguous(), self.dim, (mesh, mesh_dim))
    shards = [
        shard.narrow(self.dim, 0, len(indices))
        for shard, indices in zip(
            _functional.waited(gathered).chunk(mesh.size(mesh_dim), self.dim), held, strict=True
        )
    ]
    return torch.cat(shards, self.dim).index_select(
        self.dim, torch.cat(held).argsort().to(local_tensor.device)
    )


def _get_root_mesh_dim(self: DeviceMesh) -> int | None:
    """Which dim of its root a slice of one dim is; None for the root itself."""
    root = self._get_root_mesh()
    names = root.mesh_dim_names or ()
    is_slice = self.ndim == 1 and self != root and self.mesh_dim_names is not None
    return names.index(self.mesh_dim_names[0]) if is_slice and self.mesh_dim_names[0] in names else None  # type: ignore[index]


def _steps(positions: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides, from the outside in, of which these are the positions."""
    sizes: list[int] = []
    strides: list[int] = []
    while len(positions) > 1:
        stride, count = positions[1] - positions[0], 2
        while count < len(positions) and positions[count] == positions[0] + count * stride:
            count += 1
        sizes.insert(0, count)
        strides.insert(0, stride)
        positions = positions[::count]
    return tuple(sizes) or (1,), tuple(strides) or (0,)


def _layout(self: DeviceMesh) -> Any:
    """Which ranks of its root it has along each dim, as torch writes that down."""
    from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout

    position = {rank: index for index, rank in enumerate(self._get_root_mesh().mesh.flatten().tolist())}
    dims = []
    for dim in range(self.ndim):
        along = self.mesh.movedim(dim, -1).flatten()[: self.mesh.size(dim)].tolist()
        dims.append(_FlatLayout(*_steps([position[rank] for rank in along])))
    return _MeshLayout(dims)


def install() -> None:
    Partial.ALL_REDUCE_OPS = ("sum", "avg", "min", "max", "product")
    Partial.LINEAR_REDUCE_OPS = ("sum", "avg")
    DeviceMesh._get_root_mesh_dim = _get_root_mesh_dim  # type: ignore[method-assign]
    DeviceMesh._dim_group_names = property(  # type: ignore[assignment,method-assign]
        lambda self: [group.group_name for group in self.get_all_groups()]
    )
    DeviceMesh._layout = property(_layout)  # type: ignore[assignment,method-assign]
    DeviceMesh._rank_map = property(  # type: ignore[assignment,method-assign]
        lambda self: self._get_root_mesh().mesh.flatten()
    )
    DeviceMesh._flatten_rank_map = property(  # type: ignore[assignment,method-assign]
        lambda self: tuple(self._get_root_mesh().mesh.flatten().tolist())
    )
    DeviceMesh._coordinate_on_dim = property(DeviceMesh.get_coordinate)  # type: ignore[assignment,method-assign]
    DeviceMesh._thread_id = property(lambda _: threading.get_ident())  # type: ignore[assignment,method-assign]
    for placement in (Shard, _StridedShard):
        placement._split_tensor = _split_tensor  # type: ignore[method-assign]
        placement._select_split_tensor = _select_split_tensor  # type: ignore[method-assign]
        placement._to_replicate_tensor = _to_replicate_tensor  # type: ignore[method-assign]
    Shard._replicate_to_shard = _replicate_to_shard  # type: ignore[method-assign]
    _StridedShard._replicate_to_strided_shard = _replicate_to_shard  # type: ignore[method-assign]
    Shard.local_shard_size_and_offset = staticmethod(_local_shard_size_and_offset)  # type: ignore[method-assign]
    Shard._local_shard_size_and_offset = staticmethod(_local_shard_size_and_offset)  # type: ignore[method-assign]
    Shard._get_shard_pad_size = staticmethod(_get_shard_pad_size)  # type: ignore[method-assign]
    Shard._custom_chunk = staticmethod(_chunk)  # type: ignore[method-assign]
    _StridedShard.local_shard_size_and_offset = _strided_size_and_offset  # type: ignore[method-assign]
    _StridedShard._local_shard_size_and_offset = _strided_size_and_offset  # type: ignore[method-assign]
