"""Which operators still take the replicated fallback: all of their arguments are gathered, for want of a rule that applies.

Runs samples of PyTorch's operator database, forward and backward, with every tensor sharded along its first dim, or its last, on two ranks, and counts.

    python audit.py --output docs/replicas.md
    python audit.py --op 'linalg.*'
"""

import argparse
import collections
import fnmatch
import itertools
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tessera.experimental import implicit_replication
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import tessera
from tessera import _C, Replicate, Shard

warnings.filterwarnings("ignore")

RANKS = 2

HEADER = """# Operators that take the replicated fallback

Made by `make audit`; do not edit.

Operators that PyTorch's operator database reaches with tensors sharded along their first or last dim, forward and backward, and that had no
rule which applied in some of these calls: arguments were gathered, every rank computed all, and the result was replicated. All of them are
right. `calls` counts those of one rank. Where an operator has a rule in [operators.md](operators.md), it is one of the rare calls that the rule leaves
alone: tensors that are empty or without dims.
"""


def samples_of(info: Any, limit: int) -> list[Any]:
    dtypes = info.supported_dtypes("cpu")
    dtype = torch.float32 if torch.float32 in dtypes else next(iter(dtypes), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    try:
        return list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), limit))
    except Exception:
        return []


def placed(value: Any, mesh: tessera.DeviceMesh, last: bool) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    placements = [Shard(value.ndim - 1 if last else 0)] if value.ndim else [Replicate()]
    return tessera.distribute_tensor(value.detach(), mesh, placements, src_data_rank=None).requires_grad_(
        value.requires_grad
    )


def gathered(messages: list[str]) -> set[str]:
    """The operators of which warnings say that they had to have an argument moved."""
    found = (re.search(r"(?:^|, by )([\w:.]+): argument '", message) for message in messages)
    return {match[1] for match in found if match}


def run_sample(info: Any, sample: Any, last: bool) -> None:
    mesh = tessera.init_device_mesh("cpu", (RANKS,))
    first, args, kwargs = pytree.tree_map(
        lambda leaf: placed(leaf, mesh, last), (sample.input, sample.args, sample.kwargs)
    )
    with implicit_replication(), tessera.implicit_communication("warned"):
        results = [
            leaf
            for leaf in pytree.tree_leaves(info.op(first, *args, **kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if results:
            torch.autograd.backward(results, [torch.ones_like(leaf) for leaf in results])


def audit(patterns: list[str], limit: int) -> dict[str, dict[str, int]]:
    """Of each operator that took the replicated fallback, how often, by entry of the database."""
    found: dict[str, dict[str, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    for info in op_db:
        if not any(fnmatch.fnmatch(info.name, pattern) for pattern in patterns):
            continue
        print(f"\r{info.name:60.60}", end="", file=sys.stderr, flush=True)
        for sample, last in itertools.product(samples_of(info, limit), (False, True)):
            before = _C.fallback_counts()
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    tessera.run(RANKS, lambda: run_sample(info, sample, last), timeout=60, threads_per_rank=1)
            except Exception:
                continue  # one device cannot do it either, or it is one of the exceptions of the harness
            moved = gathered([str(each.message) for each in caught])
            for op, count in _C.fallback_counts().items():
                if count > before.get(op, 0) and op in moved:
                    found[op][info.name] += (count - before.get(op, 0)) // RANKS
    print(file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", help="entries of the database; all if not given")
    parser.add_argument("--samples", type=int, default=4, help="of each entry")
    parser.add_argument("--output", type=Path, help="where to write the table")
    options = parser.parse_args()
    found = audit(options.op or ["*"], options.samples)
    lines = [HEADER, "| operator | calls | entries of the database |", "|---|---|---|"]
    for op, entries in sorted(found.items()):
        names = sorted(entries)
        shown = " ".join(f"`{name}`" for name in names[:6]) + (
            f" and {len(names) - 6} more" if len(names) > 6 else ""
        )
        lines.append(f"| `{op.removeprefix('aten::')}` | {sum(entries.values())} | {shown} |")
    text = "\n".join(lines) + "\n"
    if options.output:
        options.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
