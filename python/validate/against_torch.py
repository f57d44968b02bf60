"""Lists calls that torch.distributed.tensor computes without communication, and Tessera does not.

Calls of operators are recorded as in validate.py. Torch's own propagation, which needs no ranks, is asked of each with every placement of its
tensors on one mesh dim. Where it redistributes nothing, and the rule here offers no such row, the call is made on real ranks, and its
collectives are counted.

    python python/validate/against_torch.py --ops 'add' 'view*'

Exits with 1 if there is one that neither EXCEPTIONS nor PARTLY explains.
"""

import argparse
import collections
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as reference
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore
from validate import Call, can_be, parts_of, proposal_of, record

import tessera
from tessera import _C, Partial, Placement, Replicate, Shard
from tessera.debug import CommDebugMode

RANKS = 2

# Where torch's answer is wrong for some values. These are not tried.
NAN = "NaN on one rank: the largest of NaN and 5 is NaN, but the operator makes a number of NaN before it is found"
EXCEPTIONS = {
    "aten::fmax": NAN,
    "aten::fmin": NAN,
    "aten::nan_to_num": NAN,
    "aten::nansum": NAN,
    "aten::sign": NAN,
    "aten::sgn": NAN,
    "aten::threshold": "it falls where the value is above the threshold",
    "aten::special_xlog1py": "0 times the logarithm of 0 is 0, but not if the 0 is a sum of partial values",
    "aten::_fft_r2c": "a Fourier transform is not monotonic",
    "aten::any": "1 and -1 are a sum of 0",
    "aten::linalg_pinv": "it is not linear in its tolerances",
    **dict.fromkeys(
        [f"aten::special_{scaled}modified_bessel_k{order}" for scaled in ("", "scaled_") for order in (0, 1)]
        + ["aten::special_modified_bessel_i1"],
        "libtorch's approximation is not monotonic to the last bit",
    ),
}

# Where it is wrong for some values in some calls. Those are not tried.
Placements = tuple[Placement, ...]
PARTLY: dict[str, tuple[str, Callable[["Call", Placements], bool]]] = {
    "aten::_to_copy": (
        "the sum of rounded partial values is not as exact as the rounded sum, sums of integers wrap around, and large ones wrap around to small ones",
        lambda call, placements: isinstance(placements[0], Partial),
    ),
    "aten::bucketize": (
        "NaN is above all boundaries: the smallest of NaN and 5 is NaN, but the smallest bucket is that of 5",
        lambda call, placements: placements[0] == Partial("min"),
    ),
    "aten::complex": (
        "complex numbers have no order",
        lambda call, placements: any(each in (Partial("max"), Partial("min")) for each in placements),
    ),
    "aten::channel_shuffle": (
        "a group of channels of which two ranks have a part does not stay where it is",
        lambda call, placements: placements[0] == Shard(1) and call.args[1] % RANKS != 0,
    ),
    **dict.fromkeys(
        ("aten::nll_loss_forward", "aten::nll_loss2d_forward"),
        (
            "a mean over samples is no mean of the ranks' means where they have unlike many targets, or weights, that count",
            lambda call, placements: call.args[3] == 1,
        ),
    ),
}


def is_excepted(name: str, call: Call, placements: Placements) -> bool:
    _, applies = PARTLY.get(name.partition(".")[0], ("", lambda call, placements: False))
    return applies(call, placements)


def choices(tensor: torch.Tensor) -> list[Placement]:
    shards: list[Placement] = [
        Shard(dim) for dim in range(tensor.ndim) if tensor.shape[dim] % RANKS == 0 and tensor.shape[dim] > 0
    ]
    partial = [Partial(op) for op in ("sum", "avg", "max", "min") if can_be(tensor, Partial(op))]
    return [Replicate(), *shards, *partial]


class Torch:
    """Torch's own propagation, on a mesh of ranks that are not there."""

    def __init__(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        self.mesh = init_device_mesh("cpu", (RANKS,))
        self.propagator = reference.DTensor._op_dispatcher.sharding_propagator  # type: ignore[attr-defined]

    def placement(self, ours: Placement) -> Any:
        if isinstance(ours, Shard):
            return reference.Shard(ours.dim)
        return reference.Partial(ours.reduce_op) if isinstance(ours, Partial) else reference.Replicate()

    def is_free(self, call: Call, placements: tuple[Placement, ...]) -> bool:
        """Whether it redistributes nothing."""
        specs = [
            DTensorSpec(self.mesh, (self.placement(each),), TensorMeta(t.shape, t.stride(), t.dtype))
            for t, each in zip(call.tensors(), placements, strict=True)
        ]
        asked = call.with_tensors(specs)  # type: ignore[arg-type]
        info = self.propagator.op_to_schema_info.get(call.op)
        try:
            schema = OpSchema(call.op, asked.args, asked.kwargs, schema_info=info)
            answer = self.propagator.propagate_op_sharding_non_cached(schema)
        except Exception:
            return False
        return not answer.needs_redistribute and answer.output_spec is not None


def collectives(call: Call, placements: tuple[Placement, ...]) -> int:
    """How many it takes here."""

    def main() -> int:
        mesh = tessera.init_device_mesh("cpu", (RANKS,))
        placed = [
            _C.from_local(
                parts_of(t, each, RANKS)[mesh.get_rank()], mesh, [each], False, list(t.shape), None, None
            )
            for t, each in zip(call.tensors(), placements, strict=True)
        ]
        with CommDebugMode() as mode:
            call.with_tensors(placed).results()
        return mode.get_total_counts()

    return max(tessera.run(RANKS, main, timeout=30))


def search(call: Call, theirs: Torch, limit: int) -> list[str]:
    tensors = call.tensors()
    if not 0 < len(tensors) <= 4:
        return []
    rows, _ = tessera.run(RANKS, lambda: proposal_of(call, tessera.init_device_mesh("cpu", (RANKS,))))[0] or (
        [],
        False,
    )
    offered = {tuple(row[0]) for row in rows if not row[2] or row[2] % RANKS == 0}
    found = []
    for placements in itertools.islice(itertools.product(*map(choices, tensors)), limit):
        if (
            placements in offered
            or is_excepted(call.name, call, placements)
            or not theirs.is_free(call, placements)
        ):
            continue
        try:
            count = collectives(call, placements)
        except Exception as error:
            found.append(
                f"{', '.join(map(str, placements))}: {type(error).__name__}: {str(error).splitlines()[0]}"
            )
            continue
        if count > 0:
            shapes = ", ".join(str(list(t.shape)) for t in tensors)
            found.append(f"{', '.join(map(str, placements))} of {shapes}: {count} collectives")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="*", default=["*"], help="names of the database, with wildcards")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--limit", type=int, default=400, help="placements tried of one call")
    options = parser.parse_args()
    theirs = Torch()
    unexplained: dict[str, list[str]] = collections.defaultdict(list)
    recorded = record(options.ops, options.samples, options.calls)
    for name, calls in recorded.items():
        if name.partition(".")[0] in EXCEPTIONS:
            continue
        for call in calls:
            unexplained[name] += search(call, theirs, options.limit)
    lists = {name: found for name, found in unexplained.items() if found}
    for name, found in lists.items():
        print(f"{name}: {len(found)}")
        for each in found[:4]:
            print(f"    {each}")
    print(f"{len(recorded)} operators; {len(lists)} communicate where torch.distributed.tensor does not.")
    return 1 if lists else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a group of ranks that are not there cannot be left
