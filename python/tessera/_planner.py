"""What the planners of ``torch.distributed.checkpoint`` ask a tensor: which boxes of it this rank has.

Its import takes long, so that it is left to those who use it.
"""

from typing import TYPE_CHECKING, Any

import torch

from tessera import _C

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def _boxes(tensor: torch.Tensor, fqn: str) -> list[tuple[torch.Size, torch.Tensor]]:
    """Where they begin, and this rank's memory of them. Of a tensor without elements: all of it, so that it is known at all."""
    if tensor.numel() == 0 and _C.is_sharded_tensor(tensor):
        return [(torch.Size(shard.shard_offsets), local.detach()) for local, shard in _C.local_shards(tensor)]
    if tensor.numel() == 0 and _C.device_mesh(tensor).get_coordinate() is not None:
        return [(torch.Size([0] * tensor.ndim), _C.local_tensor(tensor).detach().reshape(tensor.shape))]
    return [(torch.Size(offsets), box) for offsets, box in _C.local_boxes(tensor, fqn)]


def _chunk(offsets: torch.Size, box: torch.Tensor) -> "ChunkStorageMetadata":
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=offsets, sizes=box.size())


def write_items(tensor: torch.Tensor, fqn: str) -> "list[WriteItem]":
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if _C.shares_process():
        raise RuntimeError(
            "torch.distributed.checkpoint.save knows only ranks that are processes, but these are threads of tessera.run. "
            'Use tessera.checkpoint.save(..., format="dcp"), which writes the same format.'
        )
    return [
        WriteItem(
            index=MetadataIndex(fqn, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(offsets, box),
                properties=TensorProperties.create_from_tensor(box),
                size=tensor.size(),
            ),
        )
        for offsets, box in _boxes(tensor, fqn)
    ]


def chunks(tensor: torch.Tensor) -> "list[ChunkStorageMetadata]":
    return [_chunk(offsets, box) for offsets, box in _boxes(tensor, "this tensor")]


def shard(tensor: torch.Tensor, index: "MetadataIndex") -> torch.Tensor:
    boxes: list[tuple[Any, torch.Tensor]] = _boxes(tensor, index.fqn)
    for offsets, box in boxes:
        if index.offset is None or offsets == index.offset:
            return box
    raise ValueError(f"'{index.fqn}': this rank has no chunk at {tuple(index.offset or ())}.")
