"""DTensor, and the functions that make one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessera import _C, _functorch, _planner
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
        if (
            not isinstance(local_tensor, torch.Tensor)
            or _C.is_dtensor(local_tensor)
            or _functorch.wraps_dtensor(local_tensor)
        ):
            raise TypeError(
                f"from_local: expected the plain torch.Tensor that this rank holds, got {_kind(local_tensor)}."
            )
        mesh = _mesh(device_mesh)
        placed = _placements(placements, mesh)
        if stride is not None and shape is None:
            raise ValueError("from_local: stride was given, but shape was not; give both.")
        return _functorch.from_local(local_tensor, mesh, placed, run_check, shape, stride, grad_placements)

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

    def to_local(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """What this rank holds; shares its memory. Differentiable.

        ``grad_placements``: how the gradient that comes back is placed; by default as the tensor, with Partial as Replicate.
        """
        return _functorch.to_local(self, grad_placements)

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
        _C.check_no_partial(self, "this")

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """What ``torch.distributed.checkpoint.save`` writes of it on this rank."""
        return _planner.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        """What ``torch.distributed.checkpoint.load`` reads of it on this rank."""
        return _planner.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """This rank's memory of one of its chunks."""
        return _planner.shard(self, index)


def _kind(value: object) -> str:
    if _C.is_dtensor(value) or _functorch.wraps_dtensor(value):
        return "one that is distributed already"
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
    ``requires_grad`` is kept. A tensor that is distributed already must be on that mesh and placed so.
    """
    mesh = _mesh(device_mesh)
    placed = _placements(placements, mesh)
    if _C.is_dtensor(tensor):
        if _C.device_mesh(tensor) != mesh:
            raise ValueError(
                f"distribute_tensor: the tensor is distributed on {_C.device_mesh(tensor)} already, which is not {mesh}."
            )
        if not _C.is_placed(tensor, placed):
            raise ValueError(
                f"distribute_tensor: the tensor is distributed already, as {_C.placements(tensor)}; use redistribute() for {tuple(placed)}."
            )
        return tensor
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute_tensor: expected a torch.Tensor, got {_kind(tensor)}.")
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor: the tensor is the result of operators, and gradients would stop here. Use DTensor.from_local for "
            "what the ranks hold, or detach() it."
        )
    result = _C.distribute_tensor(tensor, mesh, placed, src_data_rank)
    return (
        torch.nn.Parameter(result, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else result
    )


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
    *value: torch.Tensor,
) -> torch.Tensor:
    """What a factory of ``_C`` makes. ``value``: a scalar tensor, if it fills what it makes."""
    mesh = _mesh(device_mesh)
    dtype = dtype or torch.get_default_dtype()
    return function(_size(size), mesh, _placements(placements, mesh), dtype, layout, requires_grad, *value)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> torch.Tensor:
    """A tensor of which each rank allocates only its part, with no particular values."""
    return _make(_C.empty, size, dtype, layout, requires_grad, device_mesh, placements)


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> torch.Tensor:
    """A tensor filled with ``fill_value``, of which each rank allocates only its part. Without dtype, that of the value."""
    value = torch.full((), fill_value)
    dtype = dtype or value.dtype
    return _make(_C.full, (size,), dtype, layout, requires_grad, device_mesh, placements, value)


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> torch.Tensor:
    """A tensor of zeros, of which each rank allocates only its part."""
    return _make(_C.full, size, dtype, layout, requires_grad, device_mesh, placements, torch.tensor(0))


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> torch.Tensor:
    """A tensor of ones, of which each rank allocates only its part."""
    return _make(_C.full, size, dtype, layout, requires_grad, device_mesh, placements, torch.tensor(1))


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> torch.Tensor:
    """Random numbers, uniform in [0, 1), of which each rank makes its part: the same tensor on every mesh and however it is placed."""
    return _make(_C.rand, size, dtype, layout, requires_grad, device_mesh, placements)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> torch.Tensor:
    """Normal random numbers, of which each rank makes its part: the same tensor on every mesh and however it is placed."""
    return _make(_C.randn, size, dtype, layout, requires_grad, device_mesh, placements)
