"""Save and load what a program has on all of its ranks, or on none, in any of three formats, on any mesh.

    tessera.checkpoint.save({"model": model.state_dict(), "step": 100}, "run/step-100")

    state = {"model": model.state_dict(), "step": 0}          # on other ranks, with other placements
    tessera.checkpoint.load(state, "run/step-100")            # writes into its tensors; state["step"] is 100

A state is a dict, with str or int keys, of tensors (plain, distributed, sharded, or ``torch.distributed``'s), None, bool, int,
float, str, bytes, and of dicts, lists and tuples of these. All ranks call these functions together. Where one fails, all get
the error, which names it.
"""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from tessera import _C, _world
from tessera._C import PendingSave

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

__all__ = ["LoadReport", "PendingSave", "Progress", "async_save", "latest", "load", "load_full", "save"]

Format = Literal["tessera", "huggingface", "dcp"]
Verify = Literal["first", "while_loading", "never"]


class Progress(NamedTuple):
    """How far this rank is. ``total`` is 0 while it is not yet known."""

    phase: str  # "saving", "verifying", "loading"
    bytes: int
    total: int


class LoadReport(NamedTuple):
    """Where the state and the checkpoint differ, by key."""

    missing: list[str]  # in the state, not in the checkpoint
    unexpected: list[str]  # in the checkpoint, not in the state


class _Adopt:
    """Makes tensors of ours of torch.distributed's, on the same memory, with one mesh of ours for each of theirs."""

    def __init__(self) -> None:
        self._meshes: dict[TorchMesh, _C.DeviceMesh] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        from torch.distributed.tensor import DTensor as TorchDTensor

        from tessera import sharded
        from tessera._bridge import from_torch, mesh_from_torch

        if sharded._bridge.is_torch(tensor):
            return sharded.from_torch(tensor)  # type: ignore[arg-type]
        if not isinstance(tensor, TorchDTensor):
            return None
        mesh = tensor.device_mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = mesh_from_torch(mesh)
        with torch.no_grad():
            return from_torch(tensor, self._meshes[mesh])


def _calls(progress: Callable[[Progress], object] | None) -> Callable[[str, int, int], object] | None:
    if progress is None:
        return None
    return lambda phase, count, total: progress(Progress(phase, count, total))


def save(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    format: Format = "tessera",
    keep_last: int = 0,
    file_limit: int = 5 << 30,
    progress: Callable[[Progress], object] | None = None,
) -> None:
    """Write a directory. When it returns, on any rank, the checkpoint is on the disk. What was there before, which must be a
    checkpoint or empty, stays whole until then.

    ``format``: "tessera", "huggingface" (tensors only, which are whole) or "dcp" (that of ``torch.distributed.checkpoint``).
    ``keep_last``: of checkpoints beside it whose names differ only in digits, keep so many, itself among them; 0: all.
    ``file_limit``: bytes of the largest file, for "huggingface". ``progress``: called now and then on each rank; by default,
    rank 0 shows a bar if stderr is a terminal and it takes long.
    """
    _world.ensure_if_any()
    _C.save_checkpoint(state, _Adopt(), os.fspath(path), format, keep_last, file_limit, _calls(progress))


#: Those that are still referred to when the process ends.
_pending: "weakref.WeakSet[PendingSave]" = weakref.WeakSet()


def async_save(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    format: Format = "tessera",
    keep_last: int = 0,
    file_limit: int = 5 << 30,
    progress: Callable[[Progress], object] | None = None,
) -> PendingSave:
    """As :func:`save`, but return when what is to be saved has been copied, so that it may be changed at once; the rest happens
    on another thread, which is also the one that calls ``progress``. One such save is under way at a time: the next one waits
    for it.

        pending = tessera.checkpoint.async_save(state, "run/step-100")
        ...                                 # train on
        pending.wait()                      # raises if it failed, on any rank; pending.done() does not wait
    """
    _world.ensure_if_any()
    pending = _C.async_save_checkpoint(
        state, _Adopt(), os.fspath(path), format, keep_last, file_limit, _calls(progress)
    )
    _pending.add(pending)
    return pending


@atexit.register
def _wait_for_pending() -> None:
    for pending in list(_pending):
        try:
            pending.wait()
        except Exception as error:
            print(f"tessera: a checkpoint that was saved in the background is lost: {error}", file=sys.stderr)


def load(
    state: MutableMapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: Verify = "first",
    progress: Callable[[Progress], object] | None = None,
) -> LoadReport:
    """Load a checkpoint of any format, saved on any ranks, into the state: into the memory of its tensors; other values are
    replaced in their dicts and lists. Each rank reads only what it needs.

    ``path``: a directory, or a .safetensors file. ``strict``: the state and the checkpoint must have the same keys; else what
    both have is loaded, and the result says where they differ. All that does not fit is listed in one error, before anything
    is changed. ``verify``: compare checksums "first", before anything is changed; "while_loading", which reads once, but after an
    error the state may be partly loaded; or "never".
    """
    _world.ensure_if_any()
    return LoadReport(*_C.load_checkpoint(state, _Adopt(), os.fspath(path), strict, verify, _calls(progress)))


def load_full(
    path: str | os.PathLike[str],
    *,
    verify: Verify = "first",
    progress: Callable[[Progress], object] | None = None,
) -> dict[str, Any]:
    """All of a checkpoint of any format: plain tensors on the CPU, the full ones on every rank. Keys are text, tuples are lists."""
    _world.ensure_if_any()
    return _C.load_full_checkpoint(os.fspath(path), verify, _calls(progress))


def latest(directory: str | os.PathLike[str]) -> str | None:
    """The path of the complete checkpoint in ``directory`` whose name has the largest number, by the last digits in it."""
    return _C.latest_checkpoint(os.fspath(directory)) or None
