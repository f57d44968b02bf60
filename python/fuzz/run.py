"""Tries random operators, modules and models, of random placements, modes and memory, against one device.

    python run.py                                  every operator, module and model, some times over
    python run.py --kind modules --only 'nn.LP*'   some
    python run.py --seed 7 --minutes 10            others, and for how long
    python run.py --mode autocast                  operators and modules, in this mode alone
    python run.py --kind refusals                  all that one device refuses, by the database

Each case runs in a process that may crash or hang. What fails is made as small as it can be and still fails,
and printed as a script.
"""

import argparse
import dataclasses
import fnmatch
import itertools
import multiprocessing
import os
import queue
import random
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "op_db"))

import harness
import script
import torch
from oracle import SUMMABLE, Wrong, first_line, random_placements
from script import Case

from tessera import Partial, Replicate, Shard

KINDS = ("operators", "errors", "modules", "models")
#: Those whose names are all there is to try: once, whatever the number of rounds.
KINDS_TO_THE_END = ("refusals",)
#: Those that are tried in several modes.
KINDS_WITH_MODES = ("operators", "modules")
MESHES = ((4,), (2, 2), (3,))

#: Seconds that a case may take, on ranks that wait for each other for a sixth of it at most.
LIMIT = 120

#: Kind, name, seed, and the one mode to try it in, if any: what a case is drawn from.
Key = tuple[str, str, int] | tuple[str, str, int, str]


# --- in a worker


def reductions_of(tensor: torch.Tensor) -> list[str]:
    """The kinds of partial values that it can be made of."""
    if tensor.dtype not in SUMMABLE:
        return []
    return ["sum", "sum", "avg", "product", *([] if tensor.is_complex() else ["max", "min"])]


def is_argument(name: str) -> bool:
    """What a result is distributed for. Not the weight of a gradient, nor what a result is written into."""
    return not name.startswith(("weight ", "out "))


def drawn(kind: str, name: str, seed: int, *modes: str) -> Case | None:
    """None if there is nothing to try."""
    rng = random.Random(f"{kind} {name} {seed}")
    module: Any = __import__(kind)
    options, mode, tolerance = module.draw(name, rng, modes) if modes else module.draw(name, rng)
    made = module.make(**options)
    seen: dict[str, torch.Tensor] = {}
    is_refused = harness.is_refused(harness.alone(module.compute, made, mode, {}, seen))
    mesh = rng.choice(MESHES)
    placements = {
        name: tuple(random_placements(rng, each.dim(), len(mesh), reductions_of(each)))
        for name, each in seen.items()
    }
    if rng.random() < 0.3 and any("." in name for name in seen):
        placements |= {name: None for name in placements if name.startswith("input")}
    ways = (
        {name: module.memory_of(options, name, each, rng) for name, each in seen.items()}
        if hasattr(module, "memory_of")
        else {}
    )
    memory = {name: way for name, way in ways.items() if way}
    if (
        memory
        and not is_refused
        and harness.is_refused(harness.alone(module.compute, made, mode, memory, {}))
    ):
        memory = {}  # which one device cannot do, and ranks may
    return Case(kind, options, mode, tolerance, mesh, placements, memory) if seen else None


def outcome(case: Case) -> str:
    """What is wrong, or ''."""
    module: Any = __import__(case.kind)
    try:
        made = module.make(**case.options)
        placed = {"mesh": case.mesh, "placements": case.placements, "mode": case.mode, "memory": case.memory}
        harness.check(module.compute, made, **placed, tolerance=case.tolerance)
    except Wrong as error:
        return str(error)
    return ""


def work(connection: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parent = os.getppid()
    while True:
        while not connection.poll(1):
            if os.getppid() != parent:  # it ended without a word
                return
        given = connection.recv()
        try:
            case = given if isinstance(given, Case) else drawn(*given)
            connection.send(case)
            connection.send(outcome(case) if case else "")
        except Exception as error:
            traceback.print_exc()
            connection.send(f"harness: {type(error).__name__}: {first_line(error)}")


# --- in this process


class Worker:
    def __init__(self) -> None:
        self._process: Any = None

    def run(self, given: Any) -> tuple[Case | None, str]:
        """The case that was drawn, or given, and what is wrong with it."""
        if self._process is None:
            context = multiprocessing.get_context("forkserver")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=work, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        case = None
        try:
            self._connection.send(given)
            while self._connection.poll(LIMIT):
                found = self._connection.recv()
                if isinstance(found, str):
                    return case, found
                case = found
            found = f"hung: no end after {LIMIT} s"
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self._process.join()
            found = f"crashed: exit code {self._process.exitcode}"
        self.close()
        return case, found if case else ""  # else one device hung or crashed

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def sort_of(failure: str) -> str:
    """Failures of one sort are taken for the same."""
    words = failure.split()
    if "raise" in words:
        return " ".join(
            words[: words.index("raise") + 2]
            if words[0] == "the"
            else ["alone", words[words.index("raise") + 1]]
        )
    if "'plain" in failure:
        return "plain"
    return (
        " ".join(words[:3])
        if words[:2] == ["the", "ranks"]
        else words[0]
        if words[0] in ("hung:", "crashed:", "harness:", "one")
        else "values"
    )


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are a step simpler, the greatest step first."""

    def but(**changes: Any) -> Case:
        return dataclasses.replace(case, **changes)

    for size, dim in itertools.product((2, 3, 4), range(len(case.mesh))):
        if (size,) != case.mesh and (len(case.mesh) > 1 or size < case.mesh[0]):
            yield but(
                mesh=(size,),
                placements={name: each and (each[dim],) for name, each in case.placements.items()},
            )
    if case.memory:
        yield but(memory={})
    names = [name for name, each in case.placements.items() if each is not None]
    for replacement in (None, (Replicate(),) * len(case.mesh)):
        size = len(names)
        while size:
            for first in range(0, len(names), size):
                some = {name for name in names[first : first + size] if case.placements[name] != replacement}
                if some and (replacement or any(is_argument(name) for name in names if name not in some)):
                    yield but(
                        placements={
                            name: replacement if name in some else each
                            for name, each in case.placements.items()
                        }
                    )
            size //= 2
    for name in case.memory:
        yield but(memory={other: way for other, way in case.memory.items() if other != name})
    for mode in ("no_grad", "gradients"):
        if mode != case.mode:
            yield but(mode=mode)
        else:
            break
    for option, values in (
        ("way", ["function"]),
        ("training", [False]),
        ("masked", [False]),
        ("tied", [False]),
        ("number", range(3)),
    ):
        for value in values:
            if (
                option in case.options
                and case.options[option] != value
                and not (option == "number" and case.options[option] < value)
            ):
                yield but(options={**case.options, option: value})
    for name, dim in itertools.product(names, range(len(case.mesh))):
        each = case.placements[name]
        plain = [
            Replicate(),
            Shard(0),
            *([Shard(each[dim].dim)] if hasattr(each[dim], "dim") else [Partial("sum")]),
        ]
        for placement in plain[: plain.index(each[dim])] if each[dim] in plain else plain:
            yield but(placements={**case.placements, name: (*each[:dim], placement, *each[dim + 1 :])})


def shrunk(case: Case, failure: str, worker: Worker, seconds: float) -> tuple[Case, str]:
    end = time.monotonic() + seconds
    tried = {repr(case)}
    while True:
        for candidate in simpler(case):
            if time.monotonic() > end:
                return case, failure
            if repr(candidate) in tried:
                continue
            tried.add(repr(candidate))
            found = worker.run(candidate)[1]
            if found and sort_of(found) == sort_of(failure):
                case, failure = candidate, found
                break
        else:
            return case, failure


class Report:
    def __init__(self, total: int, output: Path) -> None:
        self._lock = threading.Lock()
        self._began = self._last = time.monotonic()
        self._total, self._output = total, output
        self.passed = self.failed = self.nothing = 0

    def add(self, key: Key, case: Case | None, failure: str, is_new: bool) -> None:
        """A failure of a sort that was seen with this entry is not printed as a script again."""
        with self._lock:
            if failure:
                self.failed += 1
                text = self._script(key, case, failure) if case and is_new else ""
                print(f"FAILED {' '.join(map(str, key))}: {failure}\n{text}", flush=True)
            elif case is None:
                self.nothing += 1
            else:
                self.passed += 1
            if time.monotonic() - self._last > 20:
                self._last = time.monotonic()
                clock = time.strftime("%H:%M:%S", time.gmtime(self._last - self._began))
                tried = self.passed + self.failed + self.nothing
                print(
                    f"[{tried}/{self._total}] {clock} {self.passed} passed, {self.failed} failed", flush=True
                )

    def _script(self, key: Key, case: Case, failure: str) -> str:
        module: Any = __import__(case.kind)
        text = script.script(case, [*module.USES, module], failure)
        path = self._output / f"{'_'.join(map(str, key))}.py"
        path.write_text(text)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            done = subprocess.run(
                [sys.executable, path], env=environment, capture_output=True, text=True, timeout=LIMIT
            )
            fails = done.returncode < 0 or "Wrong: " in done.stderr
        except subprocess.TimeoutExpired:
            fails = True
        return f"{text}\n# {path}" + ("" if fails else ": alone it did not fail")


def run(keys: list[Key], workers: int, minutes: float, seconds: float, output: Path) -> Report:
    """`seconds`: for making a failure small."""
    report = Report(len(keys), output)
    output.mkdir(parents=True, exist_ok=True)
    todo: queue.SimpleQueue[Key] = queue.SimpleQueue()
    for key in keys:
        todo.put(key)
    end = time.monotonic() + 60 * minutes
    known: set[tuple[str, str, str]] = set()

    def loop() -> None:
        worker = Worker()
        while time.monotonic() < end:
            try:
                key = todo.get_nowait()
            except queue.Empty:
                break
            case, failure = worker.run(key)
            sort = (key[0], key[1], sort_of(failure)) if failure else None
            is_new = sort is not None and sort not in known
            if sort is not None and is_new and case:
                known.add(sort)
                case, failure = shrunk(case, failure, worker, seconds)
            report.add(key, case, failure, is_new)
        worker.close()

    threads = [threading.Thread(target=loop) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return report


def names_of(kind: str) -> list[str]:
    module: Any = __import__(kind)
    return list(module.names()) if kind in KINDS_TO_THE_END else module.NAMES


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kind",
        action="append",
        choices=[*KINDS, *KINDS_TO_THE_END, "lies"],
        help="what to try; may be given several times (all)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="GLOB",
        help="entries to try, as addmm or nn.Linear; may be given several times (all)",
    )
    parser.add_argument(
        "--mode",
        choices=["gradients", "no_grad", "inference_mode", "autocast"],
        help="of operators and modules, and no other kinds (all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first round (0)")
    parser.add_argument("--rounds", type=int, default=4, help="how often each entry is tried (4)")
    parser.add_argument("--count", type=int, help="how many cases of each kind to try at most (all)")
    parser.add_argument("--minutes", type=float, default=1e6, help="how long to go on (to the end)")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to make a failure small (60)")
    parser.add_argument("--workers", type=int, default=2, help="processes at once (2)")
    parser.add_argument(
        "--output", type=Path, default=Path("build/fuzz"), help="where to write the scripts (build/fuzz)"
    )
    options = parser.parse_args()
    kinds = options.kind or (KINDS_WITH_MODES if options.mode else (*KINDS, *KINDS_TO_THE_END))
    if options.mode and not set(kinds) <= set(KINDS_WITH_MODES):
        parser.error(f"only {' and '.join(KINDS_WITH_MODES)} have modes")
    modes = (options.mode,) if options.mode else ()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["harness", "script", *kinds])
    keys = []
    for kind in kinds:
        names = [
            name
            for name in names_of(kind)
            if any(fnmatch.fnmatchcase(name, glob) for glob in options.only or ["*"])
        ]
        count = 1 if kind in KINDS_TO_THE_END else options.rounds
        rounds = (
            (kind, name, seed, *modes)
            for seed in range(options.seed, options.seed + count)
            for name in random.Random(seed).sample(names, len(names))
        )
        keys += itertools.islice(rounds, options.count)
    if not keys:
        parser.error(f"nothing is called {options.only}")
    random.Random(options.seed).shuffle(keys)
    report = run(keys, options.workers, options.minutes, options.shrink, options.output)
    print(f"{report.passed} passed, {report.failed} failed, {report.nothing} with nothing to try")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
