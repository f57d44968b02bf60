"""Meshes some of whose groups have backends of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from tessera import _C
from tessera._C import DeviceMesh

#: The name of a backend, its options, or both.
Backend = Any


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Backend] | None = None,
) -> DeviceMesh:
    """A mesh over ranks 0, 1, ... of the world, row-major.

        mesh = tessera.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

    The ranks are those of ``tessera.run``, else of ``torch.distributed``, which is initialised if a launcher such as torchrun
    started this process. ``backend_override``: for some dims, by index or name, the backend of their groups, its options, or
    a tuple of both; for ranks that are processes.
    """
    if mesh_dim_names is not None:
        if len(set(mesh_dim_names)) != len(mesh_dim_names):
            raise RuntimeError(
                f"Each mesh_dim_name must be unique. Found repeated names in {tuple(mesh_dim_names)}."
            )
        if len(mesh_dim_names) != len(mesh_shape):
            raise RuntimeError(
                f"mesh_shape and mesh_dim_names should have same length! Got {tuple(mesh_shape)} and {tuple(mesh_dim_names)}."
            )
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type!r}. Choose a rank's device with torch.cuda.set_device, "
            "and give the mesh the type alone."
        )
    if backend_override is not None:
        _normalize(backend_override, len(mesh_shape), mesh_dim_names)
    mesh = _C.init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)
    if backend_override is None or mesh.get_coordinate() is None:
        return mesh
    overrides = override_groups(mesh, backend_override)
    groups = [mesh.get_group(dim) if made is None else made for dim, made in enumerate(overrides)]
    return DeviceMesh.from_group(groups, device_type, mesh.mesh, mesh_dim_names=mesh_dim_names)


def _normalize(
    overrides: Mapping[int | str, Backend], ndim: int, names: Sequence[str] | None
) -> list[Backend | None]:
    """The backend of each of `ndim` dims, or None."""
    left = dict(overrides)
    result: list[Backend | None] = []
    for dim in range(ndim):
        name = names[dim] if names else None
        if dim in left and name in left:
            raise RuntimeError(
                f"Found redundant dim index {dim} and name {name} in backend_override; give one of them."
            )
        result.append(left.pop(dim) if dim in left else left.pop(name, None) if name is not None else None)
    if left:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {list(left)}, expected integers in range [0, {ndim}) or one of {names}."
        )
    return result


def override_groups(
    mesh: DeviceMesh, overrides: Mapping[int | str, Backend], first: int = 0, count: int | None = None
) -> list[Any]:
    """The groups along `count` dims of the mesh from `first` on, made for this; None where nothing is overridden."""
    count = mesh.ndim if count is None else count
    names = mesh.mesh_dim_names and mesh.mesh_dim_names[first : first + count]
    result: list[Any] = []
    for dim, backend in enumerate(_normalize(overrides, count, names)):
        coordinate: list[Any] = list(mesh.get_coordinate() or ())
        if backend is None or not coordinate:
            result.append(None)
            continue
        coordinate[first + dim] = slice(None)
        ranks = mesh.mesh[tuple(coordinate)].tolist()
        result.append(_new_group(ranks, backend, f"mesh_{names[dim] if names else f'dim_{dim}'}"))
    return result


def override_flat_group(mesh: DeviceMesh, name: str, backend: Backend) -> Any:
    """A group of all ranks of the mesh."""
    return (
        _new_group(mesh.mesh.flatten().tolist(), backend, f"mesh_{name}") if mesh.get_coordinate() else None
    )


def _new_group(ranks: list[int], backend: Backend, description: str) -> Any:
    if _C.is_rank_thread():
        raise RuntimeError(
            "backend_override: these ranks are threads of tessera.run, which share memory and have no other backend. Leave it out."
        )
    if isinstance(backend, tuple):
        name, options = backend
    else:
        name, options = (backend, None) if isinstance(backend, str) else (None, backend)
    return dist.new_group(
        ranks,
        timeout=getattr(options, "_timeout", None),
        backend=name,
        pg_options=options,
        group_desc=description,
        use_local_synchronization=True,
    )
