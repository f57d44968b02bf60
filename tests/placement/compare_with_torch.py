"""Compares our layouts with those of the installed torch, coordinate by coordinate.

Usage: python compare_with_torch.py <path to dump_layouts>
"""

import itertools
import random
import subprocess
import sys

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

MESHES = [(1,), (2,), (3,), (4,), (7,), (2, 2), (2, 3), (4, 2), (1, 3), (2, 2, 2), (3, 2, 2)]
SHAPES = [
    (0,),
    (1,),
    (2,),
    (5,),
    (8,),
    (13,),
    (24,),
    (4, 6),
    (5, 7),
    (0, 3),
    (1, 1),
    (3, 0),
    (2, 3, 4),
    (7, 1, 5),
]
CHOICES_PER_PAIR = 12
SEED = 2013

PARTS = {"R": Replicate(), "P(sum)": Partial()}
for d in range(3):
    PARTS[f"S({d})"] = Shard(d)
    for split in (2, 3, 5):
        PARTS[f"SS({d}, {split})"] = _StridedShard(d, split_factor=split)


def cases():
    """(shape, mesh shape, placement texts, coordinate): all short lists of placements, some of the long ones."""
    rng = random.Random(SEED)
    for mesh, shape in itertools.product(MESHES, SHAPES):
        fitting = [text for text, p in PARTS.items() if getattr(p, "dim", 0) < len(shape)]
        lists = list(itertools.product(fitting, repeat=len(mesh)))
        if len(lists) > CHOICES_PER_PAIR:
            lists = rng.sample(lists, CHOICES_PER_PAIR)
        for placements in lists:
            for coordinate in itertools.product(*map(range, mesh)):
                yield shape, mesh, placements, coordinate


def words(numbers):
    return " ".join(map(str, numbers))


def main(tool):
    all_cases = list(cases())
    lines = [f"{words(s)};{words(m)};[{', '.join(p)}];{words(c)}\n" for s, m, p, c in all_cases]
    answer = subprocess.run([tool], input="".join(lines), capture_output=True, text=True, check=True)
    ours = answer.stdout.splitlines()
    if len(ours) != len(all_cases):
        sys.exit(f"{len(all_cases)} cases gave {len(ours)} answers: {answer.stderr}")

    failed = 0
    for (shape, mesh, placements, coordinate), line, got in zip(all_cases, lines, ours):
        local, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), [PARTS[text] for text in placements]
        )
        expected = f"{words(local)};{words(offset)}"
        if got != expected:
            failed += 1
            print(f"{line.strip()}: torch says {expected}, we say {got}")
    print(f"{len(all_cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
