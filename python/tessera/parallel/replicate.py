"""Data parallelism: gradients are reduced once, in buckets, while backward goes on."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from tessera import _C
from tessera._api import DTensor, _mesh, distribute_tensor
from tessera._C import DeviceMesh, Partial, Placement, Replicate


class ReplicatedModule:
    """What modules gain by :func:`replicate`."""

    _reducer: "_Reducer"

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backward reduces gradients."""
        self._reducer.is_on = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward leaves gradients as each rank computed them; the next backward outside reduces their sum."""
        before = self._reducer.is_on
        self._reducer.is_on = False
        try:
            yield
        finally:
            self._reducer.is_on = before


def replicate(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    *,
    ignored_modules: Iterable[nn.Module] = (),
    bucket_cap_mb: float = 25.0,
) -> nn.Module:
    """Let backward reduce the gradients of ``module``'s parameters over the ranks of ``device_mesh``, in place; return the module.

    What that means depends on how a parameter is there:

    - Distributed on ``device_mesh``, as :func:`distribute_module` leaves it: data are parallel by placement. The model gets the whole batch as one
      tensor that is cut, ``[Shard(0)]``; the loss is that of all of it; and a gradient, which comes as partial sums, becomes placed as its parameter.
    - Otherwise, a plain one or one that is distributed on another mesh, such as ``mesh["tp"]`` beside ``mesh["dp"]``: as in PyTorch's
      ``DistributedDataParallel``. Each rank calls the model with its own part of the batch, and gradients become the average of the ranks'.
      Such parameters and buffers are made those of the first rank now.

    Either way a gradient is reduced once, together with others in buckets of ``bucket_cap_mb``, as soon as all gradients of the bucket are
    there; where the backend works in the background, backward goes on meanwhile. All ranks must get gradients of the same parameters. The module gains ``no_sync()`` and
    ``set_requires_gradient_sync()``, to accumulate gradients first. ``ignored_modules``: submodules to leave alone.
    """
    if isinstance(module, ReplicatedModule):
        raise RuntimeError(f"replicate: this {type(module).__name__} was replicated already.")
    if bucket_cap_mb <= 0:
        raise ValueError(f"replicate: bucket_cap_mb is how many MiB of gradients are reduced together, and positive; got {bucket_cap_mb}.")
    mesh = _mesh(device_mesh)
    ignored = {tensor for each in ignored_modules for tensor in (*each.parameters(), *each.buffers())}
    parameters = [parameter for parameter in module.parameters() if parameter not in ignored]
    with torch.no_grad():
        for tensor in (*parameters, *(buffer for buffer in module.buffers() if buffer not in ignored)):
            if not _is_on(tensor, mesh):
                local = _local(tensor)
                local.copy_(_local(distribute_tensor(local, mesh)))
    reducer = _Reducer([parameter for parameter in parameters if parameter.requires_grad], mesh, int(bucket_cap_mb * 2**20))
    kind = type(module)
    module.__class__ = type(f"Replicated{kind.__name__}", (ReplicatedModule, kind), {})
    module._reducer = reducer  # type: ignore[assignment]
    return module


class _Backward:
    """What there is to reduce in a backward, and in those inside of it, as where activations are computed again. It lives as long as the engine is
    to call for it: one that failed leaves nothing behind."""

    def __init__(self, buckets: int) -> None:
        self.tasks: set[int] = set()  # of the engine, that have been told to call us in the end
        self.ready: list[set[nn.Parameter]] = [set() for _ in range(buckets)]  # by bucket: whose gradients are there and not reduced yet
        self.started: list[Callable[[], None]] = []  # what is left to do in the end


class _Reducer:
    """Reduces gradients as they come."""

    def __init__(self, parameters: list[nn.Parameter], mesh: DeviceMesh, bucket_bytes: int) -> None:
        self.is_on = True
        self._mesh = mesh
        self._under_way: Callable[[], _Backward | None] = lambda: None
        self._buckets: list[list[nn.Parameter]] = []
        size = bucket_bytes
        for parameter in reversed(parameters):  # about as backward gets there
            if size >= bucket_bytes:
                self._buckets.append([])
                size = 0
            size += _local(parameter).nbytes
            self._buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self._hook(len(self._buckets) - 1))  # type: ignore[no-untyped-call]

    def _hook(self, bucket: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if not self.is_on:
                return
            backward = self._current()
            backward.ready[bucket].add(cast(nn.Parameter, parameter))
            if len(backward.ready[bucket]) == len(self._buckets[bucket]):
                self._start(backward, bucket)

        return hook

    def _current(self) -> _Backward:
        backward = self._under_way() or _Backward(len(self._buckets))
        self._under_way = weakref.ref(backward)
        task = torch._C._current_graph_task_id()
        if task not in backward.tasks:
            backward.tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._finish, backward))
        return backward

    def _finish(self, backward: _Backward) -> None:
        for bucket in range(len(self._buckets)):
            if backward.ready[bucket]:
                self._start(backward, bucket)
        started, backward.started = backward.started, []
        for finish in started:
            finish()

    @torch.no_grad()
    def _start(self, backward: _Backward, bucket: int) -> None:
        """Reduce the gradients that are there, those that are reduced alike in one piece."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in self._buckets[bucket]:
            if parameter in backward.ready[bucket]:
                way = self._way(parameter)
                if way is not None:
                    groups.setdefault((*way, parameter.dtype, parameter.device), []).append(parameter)
        backward.ready[bucket].clear()
        for (mesh, placements, _, _), parameters in groups.items():
            gradients = [_local(_gradient(parameter)) for parameter in parameters]
            together: Any = DTensor.from_local(torch.cat([gradient.reshape(-1) for gradient in gradients]), mesh, placements)
            reduced = together.redistribute(placements=[Replicate()] * mesh.ndim, async_op=True)
            backward.started.append(functools.partial(_put, parameters, reduced, placements[0] != Partial("avg")))

    def _way(self, parameter: nn.Parameter) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        """On which mesh the local gradients are to be reduced, and how; None if there is nothing to do."""
        if not _is_on(parameter, self._mesh):
            return self._mesh, (Partial("avg"),) * self._mesh.ndim
        gradient = _gradient(parameter)
        mesh = _C.device_mesh(gradient)
        pairs = list(zip(_C.placements(gradient), _C.placements(parameter)))
        if all(given == wanted or (given == Partial() and wanted == Replicate()) for given, wanted in pairs):
            sums = tuple(Partial() if given == Partial() else Replicate() for given, _ in pairs)
            return (mesh, sums) if Partial() in sums else None
        # A reduction that leaves each rank with a part, or none of ours: by itself.
        placed: Any = gradient
        parameter.grad = placed.redistribute(placements=_C.placements(parameter))
        return None


def _is_on(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether it is distributed over these ranks, perhaps among others."""
    if not _C.is_dtensor(tensor):
        return False
    its = _C.device_mesh(tensor)
    if its == mesh:
        return True
    names, its_names = mesh.mesh_dim_names, its.mesh_dim_names
    return names is not None and its_names is not None and set(names) <= set(its_names) and mesh._get_root_mesh() == its._get_root_mesh()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _C.local_tensor(tensor) if _C.is_dtensor(tensor) else tensor.detach()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError("replicate: a gradient was removed while backward was under way; do so after it.")
    return parameter.grad


@torch.no_grad()
def _put(parameters: list[nn.Parameter], reduced: torch.Tensor, placed_as_parameter: bool) -> None:
    """Let the gradients be views of what they were reduced to."""
    flat = _local(reduced)
    begin = 0
    for parameter in parameters:
        gradient = _gradient(parameter)
        shape = _local(gradient).shape
        part = flat[begin : begin + shape.numel()].view(shape)
        begin += shape.numel()
        if _C.is_dtensor(gradient):
            placements = _C.placements(parameter if placed_as_parameter else gradient)
            part = DTensor.from_local(part, _C.device_mesh(gradient), placements, shape=gradient.shape)
        parameter.grad = part
