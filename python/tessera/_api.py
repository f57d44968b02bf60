"""DTensor, and the functions that make one."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessera import _C, _dtensor_spec, _functional, _functorch, _planner
from tessera._C import DeviceMesh, Placement, Replicate

Placements = Sequence[Placement]


class _DTensorType(type(torch.Tensor)):  # type: ignore[misc]
    """Knows distributed tensors by what they hold: their type is torch.Tensor, or torch.nn.Parameter."""

    def __instancecheck__(cls, instance: object) -> bool:
        return _C.is_dtensor(instance)


class DTensor(torch.Tensor, metaclass=_DTensorType):
    """One tensor over the ranks of a mesh.

    Every ``torch.Tensor`` that Tessera holds is an instance of it, whatever made it:

        y = x @ w                                    # x and w are distributed
        isinstance(y, tessera.DTensor)               # True
        y.placements, y.device_mesh, y.to_local()    # AttributeError on tensors that are not distributed

    Make one with :func:`distribute_tensor` or :meth:`DTensor.from_local`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "DTensor":
        """As torch's libraries call it: ``DTensor(local_tensor, spec, requires_grad=...)`` with a ``_spec``."""
        if len(args) == 2 and hasattr(args[1], "tensor_meta") and kwargs.keys() <= {"requires_grad"}:
            local, spec = args
            if local.requires_grad and not kwargs.get("requires_grad", False):
                warnings.warn(
                    "To construct a DTensor whose gradients do not go back to the local tensor, give it local_tensor.detach(); to let them "
                    "go back, use DTensor.from_local.",
                    stacklevel=2,
                )
            made = _C.from_local(
                local.detach(), spec.mesh, spec.placements, False, spec.shape, spec.stride, None
            )
            return made.requires_grad_(kwargs.get("requires_grad", False))  # type: ignore[return-value]
        raise TypeError(
            "A DTensor is not made by its class: use tessera.distribute_tensor for a tensor that should be sharded, or "
            "tessera.DTensor.from_local for what the ranks hold already."
        )

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
    ) -> torch.Tensor:
        """The tensor of which each rank of the mesh holds ``local_tensor``, whose memory it shares. Differentiable.

        ``device_mesh``: that of the surrounding ``with mesh:`` by default. ``placements``: one for each mesh dim; replicated
        by default. ``run_check``: let all ranks compare what they hold first; then a wrong shape on any of them is an error on
        every one, replicas are made those of the first, and the global shape is found from all of them. ``shape``, ``stride``:
        the global ones; by default every rank holds as much as this one. ``grad_placements``: how the gradient that goes back
        to ``local_tensor`` is placed.
        """
        if not isinstance(local_tensor, torch.Tensor) or _is_of_torch(local_tensor):
            raise TypeError(
                f"from_local: expected the plain torch.Tensor that this rank holds, got {_kind(local_tensor)}."
            )
        if _C.is_dtensor(local_tensor) or _functorch.wraps_dtensor(local_tensor):
            raise RuntimeError(
                f"from_local: the local_tensor argument only accepts torch.Tensor that this rank holds, got {_kind(local_tensor)}."
            )
        mesh = _mesh(device_mesh)
        placed = _placements(placements, mesh)
        if stride is not None and shape is None:
            raise RuntimeError(
                "from_local: got a stride, but no shape. Please pass both shape and stride at the same time."
            )
        return _functorch.from_local(
            _functional.waited(local_tensor), mesh, placed, run_check, shape, stride, grad_placements
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What the ranks along each mesh dim hold of it."""
        return _C.placements(self)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over whose ranks it is distributed."""
        return _C.device_mesh(self)

    @property
    def _local_tensor(self) -> torch.Tensor:
        """What this rank holds, aside from autograd."""
        return _C.local_tensor(self)

    @property
    def _spec(self) -> _dtensor_spec.DTensorSpec:
        """What it is: its mesh, placements, and the global shape, strides and dtype."""
        return _dtensor_spec.spec_of(self)

    def to_local(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """What this rank holds; shares its memory. Differentiable.

        ``grad_placements``: how the gradient that comes back is placed; by default as the tensor, with Partial as Replicate. That of a
        parameter counts as one.
        """
        is_parameter = isinstance(self, torch.nn.Parameter)
        if not is_parameter and not torch.is_grad_enabled() and not _functorch.is_transformed():
            return _C.local_tensor(self)
        local = _functorch.to_local(self, grad_placements)
        if is_parameter:
            local._is_param = True
        return local

    def full_tensor(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """The global tensor, on every rank of the mesh. All of them must call it. Differentiable."""
        return _functorch.full_tensor(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The same tensor placed otherwise, by the cheapest collectives that get it there. Differentiable.

        ``async_op``: return at once; the first use of the local tensor waits. ``forward_dtype``, ``backward_dtype``: what to
        communicate in, and to have then; by default the tensor's own.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(
                "redistribute: a tensor cannot move to another mesh; gather it with full_tensor() and distribute it there."
            )
        if placements is None:
            raise TypeError(
                "redistribute: say how the tensor is to be placed, as in redistribute(placements=[Replicate()])."
            )
        return _functorch.redistribute(self, placements, async_op, forward_dtype, backward_dtype)

    def _raise_if_contains_partial_placements(self) -> None:
        """An error if the tensor has yet to be reduced on some mesh dim."""
        if any(placement.is_partial() for placement in _C.placements(self)):
            raise ValueError(
                "Any checkpointing related operations are not supported for distributed tensors that have yet to be reduced, as "
                f"this one, placed {_C.placements(self)}. Redistribute it first."
            )

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What ``torch.distributed.checkpoint.save`` writes of it on this rank."""
        self._raise_if_contains_partial_placements()
        return _planner.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        """What ``torch.distributed.checkpoint.load`` reads of it on this rank."""
        self._raise_if_contains_partial_placements()
        return _planner.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """This rank's memory of one of its chunks."""
        self._raise_if_contains_partial_placements()
        return _planner.shard(self, index)


def _is_of_torch(value: object) -> bool:
    """Whether it is a DTensor of torch.distributed.tensor."""
    api = sys.modules.get("torch.distributed.tensor._api")
    return api is not None and isinstance(value, api.DTensor)


def _kind(value: object) -> str:
    if _C.is_dtensor(value) or _functorch.wraps_dtensor(value):
        return "one that is distributed already"
    if _is_of_torch(value):
        return "one of torch.distributed.tensor; convert it with tessera.from_torch"
    return f"{type(value).__name__}"


def _mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    if device_mesh is None:
        return _C.current_mesh()
    if not isinstance(device_mesh, DeviceMesh):
        from tessera._bridge import mesh_from_torch

        return mesh_from_torch(device_mesh)
    return device_mesh


def _placements(placements: Placements | None, mesh: DeviceMesh) -> Placements:
    return [Replicate()] * mesh.ndim if placements is None else placements


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> torch.Tensor:
    """``tensor`` as a distributed one: each rank gets its part of what rank ``src_data_rank`` of the mesh has.

    With ``src_data_rank=None`` each rank takes its part of what it has itself, without communication. The result is a leaf;
    ``requires_grad`` is kept. A tensor that is distributed already must be on that mesh and placed so. One on meta stays there.
    """
    mesh = _mesh(device_mesh)
    placed = _placements(placements, mesh)
    if len(placed) != mesh.ndim:
        raise ValueError(
            f"distribute_tensor: placements must have the same length as the mesh has dims, {mesh.ndim}, but there are {len(placed)}: {tuple(placed)}."
        )
    if _C.is_dtensor(tensor):
        if _C.device_mesh(tensor) != mesh:
            raise ValueError(
                f"distribute_tensor: the tensor is distributed on {_C.device_mesh(tensor)} already, and cannot be distributed to a different device mesh, {mesh}."
            )
        if not _C.is_placed(tensor, placed):
            raise ValueError(
                f"distribute_tensor: the tensor is distributed already, as {_C.placements(tensor)}. To go to a different placements tuple, {tuple(placed)}, use redistribute()."
            )
        return tensor
    if not isinstance(tensor, torch.Tensor) or _is_of_torch(tensor):
        raise TypeError(f"distribute_tensor: expected a plain torch.Tensor, got {_kind(tensor)}.")
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor can only distribute leaf tensors: this one is the result of operators, and gradients would stop here. Use DTensor.from_local for "
            "what the ranks hold, or detach() it."
        )
    result = _C.distribute_tensor(tensor, mesh, placed, src_data_rank)
    return (
        torch.nn.Parameter(result, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else result
    )


def _shard_tensor(
    full_tensor: torch.Tensor, placements: Placements, device_mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """``full_tensor``, which all ranks have alike, as a distributed one, without communication."""
    return distribute_tensor(full_tensor, device_mesh, placements, src_data_rank=None)


def _size(size: tuple[Any, ...]) -> list[int]:
    return list(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else list(size)


def _make(
    function: Callable[..., torch.Tensor],
    size: tuple[Any, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Placements | None,
    device: torch.device | str | None,
    fill_value: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """What a factory of ``_C`` makes. ``fill_value``: for one that fills what it makes."""
    mesh = _mesh(device_mesh)
    dtype = dtype or torch.get_default_dtype()
    kind = torch.get_default_device().type if device is None else torch.device(device).type
    if kind == "meta":
        made = torch.empty(
            _size(size), dtype=dtype, layout=layout, device="meta", requires_grad=requires_grad
        )
        return distribute_tensor(made, mesh, placements, src_data_rank=None)
    if device is not None and kind != mesh.device_type:
        raise ValueError(
            f"The tensors of {mesh} lie on its own devices or, without memory, on meta; got device={str(device)!r}."
        )
    value = () if fill_value is None else (torch.as_tensor(fill_value, device="cpu"),)
    return function(_size(size), mesh, _placements(placements, mesh), dtype, layout, requires_grad, *value)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A tensor of which each rank allocates only its part, with no particular values.

    ``device``: "meta" for a tensor that has no memory yet, here and for the functions below, as inside ``with torch.device("meta"):``.
    ``torch.empty_like(tensor, device="cpu")`` and ``Module.to_empty(device="cpu")`` then give each rank memory for its part.
    """
    return _make(_C.empty, size, dtype, layout, requires_grad, device_mesh, placements, device)


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A tensor filled with ``fill_value``, of which each rank allocates only its part. Without dtype, that of the value."""
    value = torch.full((), fill_value, device="cpu")
    dtype = dtype or value.dtype
    return _make(_C.full, (size,), dtype, layout, requires_grad, device_mesh, placements, device, value)


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A tensor of zeros, of which each rank allocates only its part."""
    return _make(_C.full, size, dtype, layout, requires_grad, device_mesh, placements, device, 0)


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A tensor of ones, of which each rank allocates only its part."""
    return _make(_C.full, size, dtype, layout, requires_grad, device_mesh, placements, device, 1)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Random numbers, uniform in [0, 1), of which each rank makes its part: the same tensor on every mesh and however it is placed."""
    return _make(_C.rand, size, dtype, layout, requires_grad, device_mesh, placements, device)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Normal random numbers, of which each rank makes its part: the same tensor on every mesh and however it is placed."""
    return _make(_C.randn, size, dtype, layout, requires_grad, device_mesh, placements, device)
