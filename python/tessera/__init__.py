"""Distributed tensors: one tensor, many ranks.

Each rank holds a shard, a replica or a partial sum of a tensor, and every operator, gradient and checkpoint works as if the
tensor were on one device. The names are those of ``torch.distributed.tensor``; the tensors are Tessera's, made in C++, and operators on
them never enter Python.

    import torch, tessera
    from tessera import Replicate, Shard

    def main():
        mesh = tessera.init_device_mesh("cpu", (4,))
        x = tessera.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
        w = tessera.distribute_tensor(torch.ones(4, 6), mesh, [Replicate()])
        return (x @ w).sum().item()

    tessera.run(4, main)       # four ranks, threads of this process: [192.0, 192.0, 192.0, 192.0]

Started by torchrun, or with ``torch.distributed`` initialised, the ranks are its processes, and ``main()`` is called as it is.
"""

import os as _os

import torch as _torch  # its libraries must be loaded before ours

from tessera import _built_with

if _torch.__version__.partition("+")[0] != _built_with.TORCH:
    # Libraries of C++ do not fit other versions, and say so by symbols that they miss, or not at all.
    raise ImportError(
        f"This tessera was built with torch {_built_with.TORCH}, but torch {_torch.__version__} is installed. Install torch=={_built_with.TORCH}, "
        "or build tessera with the torch that you have: pip install --no-build-isolation . in its sources."
    )

from tessera import (
    _clip,
    _composites,
    _patches,
    _utils,
    checkpoint,
    debug,
    experimental,
    parallel,
    pipelining,
    random,
    sharded,
)
from tessera._api import DTensor, distribute_tensor, empty, full, ones, rand, randn, zeros
from tessera._bridge import from_torch, to_torch
from tessera._C import (
    DeviceMesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    _NormPartial,
    _StridedShard,
    get_rank,
    get_world_size,
)
from tessera._guards import ExplicitRedistributionContext, Strict, assert_placements, implicit_communication
from tessera._mesh import init_device_mesh
from tessera._module import distribute_module
from tessera._utils import compute_local_shape_and_global_offset
from tessera._world import run
from tessera.random import manual_seed

cmake_prefix_path = _os.path.join(_os.path.dirname(__file__), "share", "cmake")
"""Where CMake finds the C++ package that the wheel brings along: ``-DCMAKE_PREFIX_PATH=...``, as with ``torch.utils.cmake_prefix_path``."""

__all__ = [
    "DTensor",
    "DeviceMesh",
    "ExplicitRedistributionContext",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Strict",
    "assert_placements",
    "checkpoint",
    "cmake_prefix_path",
    "debug",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "experimental",
    "from_torch",
    "full",
    "get_rank",
    "get_world_size",
    "implicit_communication",
    "init_device_mesh",
    "manual_seed",
    "ones",
    "parallel",
    "pipelining",
    "rand",
    "randn",
    "random",
    "run",
    "sharded",
    "to_torch",
    "zeros",
]

_clip.install()
_composites.install()
random.install()
_patches.install()
_utils.install()
