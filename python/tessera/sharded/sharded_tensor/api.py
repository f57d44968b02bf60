"""The class of sharded tensors."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from tessera import _C, _planner
from tessera.sharded.op_registry_utils import Table
from tessera.sharded.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from tessera.sharded.sharded_tensor.shard import LocalShard, Shard
from tessera.sharded.sharded_tensor.utils import _flatten_tensor_size
from tessera.sharded.sharding_spec.api import (
    _CUSTOM_SHARDING_SPEC_OPS,
    ShardingSpec,
    _dispatch_custom_op,
    _has_custom_op,
)

#: Implementations of torch functions in Python: those of users, and those that are used where users have none. Operators that
#: have neither are looked up in C++ (docs/sharded.md).
_CUSTOM_SHARDED_OPS: Table = {}
_SHARDED_OPS: Table = {}


def adopt(tensor: torch.Tensor) -> "ShardedTensor":
    """A sharded tensor of C++ as an object of our class: the same object."""
    tensor.__class__ = ShardedTensor
    return tensor  # type: ignore[return-value]


def _adopt_all(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return adopt(result) if type(result) is torch.Tensor and _C.is_sharded_tensor(result) else result
    if type(result) in (list, tuple):
        return type(result)(_adopt_all(each) for each in result)
    return result


def ranks_argument(process_group: Any, placements: Sequence[Any] = ()) -> Any:
    """A group as C++ takes it: a ProcessGroup, global ranks, or None for all. This rank may be outside of a group of torch.distributed,
    which then does not say who is in it: the ranks of these placements are."""
    if isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        return sorted({each.rank() for each in placements if each is not None and each.rank() is not None})
    return process_group


def _placements(spec: ShardingSpec, size: torch.Size, process_group: Any) -> Sequence[Any]:
    """Those of the shards, where somebody needs them."""
    if not isinstance(process_group, int):
        return ()
    return [each.placement for each in spec.build_metadata(size, TensorProperties()).shards_metadata]


class WorkerInfo(NamedTuple):
    """Who has a shard: as ``torch.distributed.rpc.WorkerInfo``."""

    id: int
    name: str


class RemoteShard:
    """A shard on another rank: what a ``torch.distributed.rpc.RRef`` of it would be. Ranks that are threads need no RPC. Its owner keeps the
    shard as long as there is a handle."""

    def __init__(self, shard: _C.RemoteShard) -> None:
        self._shard = shard

    @property
    def metadata(self) -> Any:
        return self._shard.metadata

    def owner(self) -> WorkerInfo:
        return WorkerInfo(self._shard.rank, self.owner_name())

    def owner_name(self) -> str:
        if _C.is_rank_thread():
            return f"worker{self._shard.rank}"
        agent: Any = torch._C._distributed_rpc._get_current_rpc_agent()
        return str(agent.get_worker_info(self._shard.rank).name)

    def is_owner(self) -> bool:
        return False

    def to_here(self, timeout: float | None = None) -> Shard:
        """A copy of what it holds now, in CPU memory. Only this rank has to call it. ``timeout``: seconds; by default that of RPC."""
        made = Shard.__new__(Shard)  # not checked: its placement is where it came from
        made.tensor = self._shard.fetch(timeout if timeout is not None and timeout > 0 else None)
        made.metadata = self._shard.metadata
        return made


class ShardedTensorBase(torch.Tensor):
    """What a sharded tensor is known to be, and some of its shards, where there are no ranks. Its data cannot be computed with."""

    _metadata: ShardedTensorMetadata
    _sharding_spec: ShardingSpec
    _local_shards: list[Shard]

    def metadata(self) -> ShardedTensorMetadata:
        """All shards, of all ranks."""
        return self._metadata

    def local_shards(self) -> list[Shard]:
        """What this rank holds; may be none. They are the tensor's own: writes into them write into it."""
        return self._local_shards

    def sharding_spec(self) -> ShardingSpec:
        """How it is sharded."""
        return self._sharding_spec

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.metadata()})"

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> "ShardedTensorBase":
        """Without ranks: these shards, whosesoever they are."""
        shards = sharded_tensor_metadata.shards_metadata
        properties = sharded_tensor_metadata.tensor_properties
        if len(shards) == 0:
            raise ValueError("The metadata has no shards.")
        if properties.layout != torch.strided:
            raise ValueError(f"Only strided tensors can be sharded, not {properties.layout} ones.")
        _C.validate_non_overlapping_shards(shards)
        _C.check_shards_cover(shards, sharded_tensor_metadata.size)
        made: Any = torch.empty(
            sharded_tensor_metadata.size,
            dtype=properties.dtype,
            device="meta",
            requires_grad=properties.requires_grad,
        )
        made.__class__ = ShardedTensorBase
        made._metadata = sharded_tensor_metadata
        made._sharding_spec = _C.infer_sharding_spec(shards) if sharding_spec is None else sharding_spec
        made._local_shards = local_shards
        return made  # type: ignore[no-any-return]


class ShardedTensor(ShardedTensorBase):
    """A tensor split into boxes that lie on many ranks: any tiling, any number of boxes on a rank, also none.

    ``size``: ints, or a sequence of them. ``process_group``: the ranks that share it: a group of torch.distributed, global ranks, or None for
    all. ``init_rrefs``: let the ranks know each other's shards (:meth:`remote_shards`), which is collective. Each rank allocates its
    shards only.

    Its local shards are ordinary tensors, and share ``requires_grad`` and the gradient with it, so that optimisers of torch work on it.
    """

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> "ShardedTensor":
        return make(
            "empty",
            sharding_spec,
            size,
            dtype=dtype,
            layout=layout,
            requires_grad=requires_grad,
            pin_memory=pin_memory,
            memory_format=memory_format,
            process_group=process_group,
            init_rrefs=init_rrefs,
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def _metadata(self) -> ShardedTensorMetadata:  # type: ignore[override]
        # One object while nothing changes, as programs expect.
        key = _C.sharded_metadata_hash(self)
        known: tuple[int, ShardedTensorMetadata] | None = self.__dict__.get("_known_metadata")
        if known is None or known[0] != key:
            known = self.__dict__["_known_metadata"] = (key, _C.sharded_metadata(self))
        return known[1]

    @property
    def _local_shards(self) -> list[Shard]:  # type: ignore[override]
        return [
            LocalShard(self, index, tensor, metadata)
            for index, (tensor, metadata) in enumerate(_C.local_shards(self))
        ]

    @property
    def _sharding_spec(self) -> ShardingSpec:
        return _C.sharding_spec(self)

    @_sharding_spec.setter
    def _sharding_spec(self, spec: ShardingSpec) -> None:
        if spec != _C.sharding_spec(self):
            raise ValueError(
                f"The tensor is sharded by {_C.sharding_spec(self)}, not by {spec}: call reshard."
            )

    @property
    def _process_group(self) -> Any:
        return _C.sharded_group(self)

    @property
    def _init_rrefs(self) -> bool:
        return _C.has_rrefs(self)

    def local_tensor(self) -> torch.Tensor:
        """The tensor of the only shard of this rank."""
        shards = _C.local_shards(self)
        if len(shards) != 1:
            raise NotImplementedError(
                f"local_tensor: this rank has {len(shards)} shards of the tensor, not one. Use local_shards()."
            )
        return shards[0][0]

    def local_tensors(self) -> list[torch.Tensor]:
        """The tensors of the local shards; on a rank that has none, one empty tensor instead. A loss made of these can be differentiated on
        every rank, as it must be where backward is collective (after resharding)."""
        return _C.local_tensors(self)

    def remote_shards(self) -> dict[int, list[RemoteShard]]:
        """What the other ranks hold, by rank, if the tensor was made with ``init_rrefs``. Ranks without shards are not in it."""
        return {
            rank: [RemoteShard(shard) for shard in shards] for rank, shards in _C.remote_shards(self).items()
        }

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """The full tensor, on the ``dst``-th rank of the group; None on the others. Collective.

        ``out``: where it is to be written, on that rank only; by default a new tensor. ``dtype``: what the values are sent as; by default
        the tensor's own. ``enforce_dtype``: ``out`` must have the tensor's own dtype.
        """
        return _C.gather_sharded(self, dst, out, enforce_dtype, dtype)

    def reshard(self, resharding_spec: ShardingSpec) -> "ShardedTensor":
        """Shard this tensor by another spec, of any kind, and return it. Collective: one exchange, in which each element that changes its
        rank is sent once. Its local shards are new tensors afterwards; a leaf stays a leaf, with its gradient.
        ``tessera.sharded.reshard(tensor, spec)`` leaves this one as it is."""
        return adopt(_C.reshard(self, resharding_spec, in_place=True))

    def to(self, *args: Any, **kwargs: Any) -> "ShardedTensor":
        """The same tensor on a device of each rank, or in another dtype; itself if it is so already. ``process_group``: of the new tensor,
        where another device needs another backend."""
        process_group = kwargs.pop("process_group", None)
        copied = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        return self._moved(device, dtype, non_blocking, copied, memory_format, process_group)

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None
    ) -> "ShardedTensor":
        """In CPU memory; itself if it is there already."""
        return self._moved(torch.device("cpu"), None, False, False, memory_format, process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> "ShardedTensor":
        """On the current CUDA device of each rank."""
        target = torch.device("cuda" if device is None else device)
        return self._moved(target, None, non_blocking, False, memory_format, process_group)

    def _moved(
        self,
        device: torch.device | None,
        dtype: torch.dtype | None,
        non_blocking: bool,
        copied: bool,
        memory_format: torch.memory_format | None,
        process_group: Any,
    ) -> "ShardedTensor":
        placements = [each.placement for each in self.metadata().shards_metadata]
        return adopt(
            _C.move_sharded(
                self,
                device,
                dtype,
                non_blocking,
                copied,
                memory_format or torch.preserve_format,
                ranks_argument(process_group, placements),
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only tensors that are no result of operators (graph leaves) can be deep-copied; detach() or clone() this one."
            )
        made = memo[id(self)] = adopt(_C.copy_sharded(self))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name != "_known_metadata":
                made.__dict__[name] = copy.deepcopy(value, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        from tessera.sharded._rebuild import reduce_sharded_tensor

        return reduce_sharded_tensor(self)

    __hash__ = torch.Tensor.__hash__

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What ``torch.distributed.checkpoint.save`` writes of it on this rank."""
        return _planner.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        """What ``torch.distributed.checkpoint.load`` reads of it on this rank."""
        return _planner.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """This rank's memory of one of its chunks."""
        return _planner.shard(self, index)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        implementation = _CUSTOM_SHARDED_OPS.get(func)
        if implementation is not None:
            return implementation(types, args, kwargs, _first(args, kwargs)._process_group)
        if any(func in table for table in _CUSTOM_SHARDING_SPEC_OPS.values()):
            tensor = _first(args, kwargs)
            spec = tensor._sharding_spec
            if _has_custom_op(spec, func):
                return _dispatch_custom_op(spec, func, types, args, kwargs, tensor._process_group)
        implementation = _SHARDED_OPS.get(func)
        if implementation is not None:
            return implementation(types, args, kwargs, _first(args, kwargs)._process_group)
        with torch._C.DisableTorchFunctionSubclass():
            return _adopt_all(func(*args, **kwargs))

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: list[Shard],
        *global_size: Any,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> "ShardedTensor":
        """The tensor of which each rank holds these shards, which are shared, not copied. Collective: the ranks exchange their metadata, and
        what does not fit, on whichever rank, is an error on every one.

        If a size is None, each rank must have exactly one shard, and these lie one after the other along dim 0, in the order of their ranks.
        """
        size: Sequence[int | None] = (
            global_size if any(each is None for each in global_size) else _flatten_tensor_size(global_size)
        )
        return adopt(_C.sharded_from_local_shards(local_shards, size, process_group, init_rrefs))

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> "ShardedTensor":
        """The tensor sharded by this spec of which this rank's only shard is ``local_tensor``. Nothing is compared between ranks."""
        size = _flatten_tensor_size(global_size)
        group = ranks_argument(process_group, _placements(sharding_spec, size, process_group))
        return adopt(_C.sharded_from_local_tensor(local_tensor, sharding_spec, size, group, init_rrefs))

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Any = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> "ShardedTensor":
        """The tensor that the metadata describes, of which this rank holds these shards. Nothing is compared between ranks."""
        placements = [each.placement for each in sharded_tensor_metadata.shards_metadata]
        return adopt(
            _C.sharded_from_global_metadata(
                local_shards,
                sharded_tensor_metadata,
                ranks_argument(process_group, placements),
                init_rrefs,
                sharding_spec,
            )
        )


def make(
    name: str,
    sharding_spec: ShardingSpec,
    size: Sequence[Any],
    value: Any = 0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    sizes = _flatten_tensor_size(size)
    return adopt(
        _C.make_sharded(
            name,
            sharding_spec,
            sizes,
            torch.tensor(value, device="cpu"),
            dtype,
            layout,
            requires_grad,
            pin_memory,
            memory_format,
            ranks_argument(process_group, _placements(sharding_spec, sizes, process_group)),
            init_rrefs,
        )
    )


def _first(args: Any, kwargs: Any) -> ShardedTensor:
    return next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, ShardedTensor))


def _create_tensor_from_params(
    *size: Any, local_device: torch.device, tensor_properties: TensorProperties
) -> torch.Tensor:
    return torch.empty(
        *size,
        dtype=tensor_properties.dtype,
        layout=tensor_properties.layout,
        device=local_device,
        requires_grad=tensor_properties.requires_grad,
        memory_format=tensor_properties.memory_format,
        pin_memory=tensor_properties.pin_memory,
    )
