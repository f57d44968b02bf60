"""Data parallelism: gradients are reduced once, in buckets, while backward goes on."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from tessera import _C
from tessera._api import _mesh
from tessera._C import DeviceMesh, GradientReduction


class ReplicatedModule:
    """What modules gain by :func:`replicate`."""

    _reduction: GradientReduction

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backward reduces gradients."""
        self._reduction.enabled = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward leaves gradients as each rank computed them; the next backward outside reduces their sum."""
        before = self._reduction.enabled
        self._reduction.enabled = False
        try:
            yield
        finally:
            self._reduction.enabled = before


def replicate(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    *,
    ignored_modules: Iterable[nn.Module] = (),
    bucket_cap_mb: float = 25.0,
) -> nn.Module:
    """Let backward reduce the gradients of ``module``'s parameters over the ranks of ``device_mesh``, in place; return the module.

    What that means depends on the parameter:

    - Distributed on ``device_mesh``, as :func:`distribute_module` leaves it: data are parallel by placement. The model gets the global batch as
      one tensor, ``[Shard(0)]``; the loss is that of all of it; and a gradient, which comes as partial values, gets the placements of its
      parameter.
    - Otherwise, a plain one or one that is distributed on another mesh, such as ``mesh["tp"]`` beside ``mesh["dp"]``: as in PyTorch's
      ``DistributedDataParallel``. Each rank calls the model with its own batch, and gradients become the average of the ranks'.
      Such parameters and buffers get the values of the first rank now.

    Either way a gradient is reduced once, together with others in buckets of ``bucket_cap_mb`` (the first one is smaller, so that communication
    begins early), as soon as it is full; where the backend works in the background, backward goes on meanwhile. All ranks must get gradients
    of the same parameters. The module gains ``no_sync()`` and ``set_requires_gradient_sync()``, to accumulate gradients first.
    ``ignored_modules``: submodules to leave alone.
    """
    if isinstance(module, ReplicatedModule):
        raise RuntimeError(f"replicate: this {type(module).__name__} was replicated already.")
    if bucket_cap_mb <= 0:
        raise ValueError(
            f"replicate: bucket_cap_mb is how many MiB of gradients are reduced together, and positive; got {bucket_cap_mb}."
        )
    mesh = _mesh(device_mesh)
    ignored = {tensor for each in ignored_modules for tensor in (*each.parameters(), *each.buffers())}
    parameters = [parameter for parameter in module.parameters() if parameter not in ignored]
    for tensor in (*parameters, *(buffer for buffer in module.buffers() if buffer not in ignored)):
        if not _C.is_distributed_on(tensor, mesh):
            _C.broadcast_values(tensor, mesh)
    bucket_bytes = max(int(bucket_cap_mb * 2**20), 1)
    reduction = GradientReduction(mesh, bucket_bytes, min(bucket_bytes, 2**20))
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(reduction.ready)  # type: ignore[no-untyped-call]
    kind = type(module)
    module.__class__ = type(f"Replicated{kind.__name__}", (ReplicatedModule, kind), {})
    module._reduction = reduction  # type: ignore[assignment]
    return module
