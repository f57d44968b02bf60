"""Prints what an operator call costs in instructions, which do not depend on what else the machine does: plain, and on a distributed tensor.

    python instructions.py build/bench/bench_dispatch
    python instructions.py build/bench/bench_dispatch --only mm --functions 30     the functions that it costs most in, besides

Needs valgrind. The cost of one call is the difference of two runs with different numbers of calls, so starting up does not count.
"""

import argparse
import collections
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OPERATORS = ("add",)  # a run under valgrind takes half a minute
LIBRARIES = {
    "libtessera": "Tessera",
    "libtorch": "libtorch",
    "libc10": "libtorch",
    "libc.": "C library",
    "libstdc": "C library",
}
CALLS = (2000, 4000)

Costs = collections.Counter[tuple[str, str]]


def costs_of(program: str, operator: str, on: str, calls: int) -> Costs:
    """(library, function) -> instructions of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", program]
        command += ["--only", operator, "--calls", str(calls), "--on", on]
        subprocess.run(command, check=True, capture_output=True)
        return parsed(out.read_text().splitlines())


def parsed(lines: list[str]) -> Costs:
    """Of callgrind's format: names are numbered where they first occur; the line after "calls=" is what the callee cost."""
    names: dict[tuple[str, str], str] = {}
    costs: Costs = collections.Counter()
    library = function = ""
    is_callee = False

    def name(kind: str, text: str) -> str:
        number, given = re.match(r"\((\d+)\)\s*(.*)", text).groups()  # type: ignore[union-attr]
        if given:
            names[kind, number] = given
        return names.get((kind, number), "?")

    for line in lines:
        if line.startswith("ob="):
            library = Path(name("ob", line[3:])).name
        elif line.startswith("fn="):
            function = name("fn", line[3:])
        elif line.startswith(("cob=", "cfn=")):
            name(line[1:3], line[4:])
        elif line.startswith("calls="):
            is_callee = True
        elif re.match(r"[+\-*\d]\S* \d+$", line):
            if not is_callee:
                costs[library, function] += int(line.split()[1])
            is_callee = False
    return costs


def per_call(program: str, operator: str, on: str) -> dict[tuple[str, str], float]:
    few, many = (costs_of(program, operator, on, calls) for calls in CALLS)
    return {key: (cost - few[key]) / (CALLS[1] - CALLS[0]) for key, cost in many.items() if cost != few[key]}


def kind_of(library: str) -> str:
    return next((kind for prefix, kind in LIBRARIES.items() if library.startswith(prefix)), "others")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", help="bench_dispatch")
    parser.add_argument("--only", action="append", help="this operator; several may be given")
    parser.add_argument("--functions", type=int, default=0, help="how many functions to list")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("There is no valgrind, so instructions are not counted: apt-get install valgrind")
        return 0
    kinds = ("Tessera", "libtorch", "C library", "others")
    print("Instructions a call: of the plain operator, and what a distributed one adds, by library")
    print(f"{'':12}{'plain':>8}{'added':>8}" + "".join(f"{kind:>12}" for kind in kinds))
    for operator in options.only or OPERATORS:
        plain, ours = (per_call(options.program, operator, on) for on in ("plain", "1-d"))
        added: collections.Counter[str] = collections.Counter()
        for costs, sign in ((ours, 1), (plain, -1)):
            for (library, _), cost in costs.items():
                added[kind_of(library)] += sign * cost
        total = sum(plain.values())
        print(
            f"{operator:12}{total:8.0f}{sum(ours.values()) - total:8.0f}"
            + "".join(f"{added[kind]:12.0f}" for kind in kinds)
        )
        for (library, function), cost in sorted(ours.items(), key=lambda item: -item[1])[: options.functions]:
            print(
                f"    {cost:6.0f} {cost - plain.get((library, function), 0):+7.0f}  {library}  {function[:120]}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
