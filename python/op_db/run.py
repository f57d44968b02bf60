"""Tries every operator of PyTorch's own database on distributed tensors, against one device.

python run.py                              all of them; a table op -> right | refused | wrong in op_db.md, details in op_db.json
python run.py --op 'linalg.*' --op addmm   some
python run.py --op addmm --case 17         one case again, with the numbers and the whole error
"""

import argparse
import collections
import fnmatch
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cases
import check
import exceptions
import torch
from check import KINDS, Case, Outcome

#: The columns of the table: (mesh, whether of gradients).
COLUMNS = [(mesh, gradient) for mesh in cases.MESHES for gradient in (False, True)]


@dataclass
class Options:
    samples: int
    mixes: int
    meshes: list[tuple[int, ...]]
    gradients: bool
    timeout: float


@dataclass
class Row:
    """What came of one operator."""

    op: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # by column, by kind
    failures: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""
    seconds: float = 0

    def add(self, outcome: Outcome) -> None:
        sample, mesh, _layout = cases.case_parts(outcome.case)
        column = column_name(cases.MESHES[mesh], outcome.what.endswith("gradient"))
        kind = outcome.kind
        reason = exceptions.MAY_REFUSE.get((self.op, outcome.what.removesuffix(" gradient")))
        if kind == "refused" and reason is not None:
            kind = "excepted"
            self.note = f"may be refused {outcome.what}: {reason}"
        counts = self.counts.setdefault(column, {})
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in ("right", "excepted"):
            self.failures.append({**asdict(outcome), "sample": sample, "mesh": cases.MESHES[mesh]})

    def worst(self, column: str | None = None) -> str:
        """Of one column or of all; "" if nothing was tried."""
        columns = self.counts.values() if column is None else [self.counts.get(column, {})]
        kinds = {kind for counts in columns for kind in counts}
        return max(kinds, key=KINDS.index, default="")


def why_nothing(name: str) -> str:
    """Why an operator has no cases."""
    if cases.dtype_of(cases.OPS[name]) is None:
        return "not on the CPU, or not of this dtype"
    has_tensors = any(cases.Inputs(sample).tensors for _, sample in cases.samples_of(cases.OPS[name], None))
    return "one device cannot do it either" if has_tensors else "it takes no tensor"


def column_name(mesh: tuple[int, ...], gradient: bool) -> str:
    return f"{'gradient' if gradient else 'forward'} ({','.join(map(str, mesh))})"


def cases_of(name: str, options: Options, after: int = -1, only: int | None = None) -> list[Case]:
    op = cases.OPS[name]
    sample = None if only is None else cases.case_parts(only)[0]
    found = []
    for number, given in cases.samples_of(op, options.samples, sample):
        last = cases.case_number(number, len(cases.MESHES) - 1, cases.LAYOUTS - 1)
        inputs = cases.Inputs(given)
        if last <= after or not inputs.tensors:
            continue
        references = list(cases.references(op, given, inputs, options.gradients))
        for index, mesh in enumerate(cases.MESHES):
            layouts = cases.layouts_of(name, number, inputs.tensors, mesh, options.mixes)
            for layout, placements in layouts.items():
                case = cases.case_number(number, index, layout)
                if references and mesh in options.meshes and case > after and only in (None, case):
                    found.append(Case(case, mesh, placements, inputs, references))
    return found


# --- workers: processes, as an operator may crash or hang


def worker(connection: Connection, case: Any, options: Options) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parent = os.getppid()
    while True:
        while not connection.poll(1):
            if os.getppid() != parent:  # it ended without a word
                return
        name, after = connection.recv()
        tolerance = cases.tolerance_of(cases.OPS[name], cases.dtype_of(cases.OPS[name]) or torch.float32)

        def begin(number: int) -> None:
            case.value = number

        try:
            found = cases_of(name, options, after)
            check.run_cases(
                found,
                tolerance,
                options.gradients,
                options.timeout,
                begin,
                lambda outcome: connection.send(outcome),
            )
            connection.send(len(found))
        except Exception:
            connection.send(traceback.format_exc())


class Worker:
    """One process that tries operators one after another."""

    def __init__(self, options: Options, limit: float) -> None:
        self._options = options
        self._limit = limit
        self._process: Any = None
        self.row: Row | None = None

    def start(self, row: Row, after: int = -1) -> None:
        if self._process is None:
            context = multiprocessing.get_context("fork")
            self.connection, theirs = context.Pipe()
            self._case = context.Value("q", -1)
            self._process = context.Process(
                target=worker, args=(theirs, self._case, self._options), daemon=True
            )
            self._process.start()
            theirs.close()
        self._case.value = -1
        self._last = (-1, time.monotonic())
        if self.row is not row:
            self.row, self._began, self._restarts = row, time.monotonic(), 0
        self.connection.send((row.op, after))

    def poll(self) -> Row | None:
        """The row, once it is done."""
        assert self.row is not None
        row = self.row
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, Outcome):
                    row.add(message)
                    continue
                if isinstance(message, str):
                    row.note = "harness: " + message.strip().splitlines()[-1]
                    row.add(Outcome(max(self._case.value, 0), "function", "crashed", row.note))
                    print(message, file=sys.stderr)
                elif not message and not row.counts:
                    row.note = row.note or why_nothing(row.op)
                return self._finish()
        except (EOFError, ConnectionResetError):
            return self._died("crashed", f"exit code {self._stop()}")
        now = time.monotonic()
        if self._case.value != self._last[0]:
            self._last = (self._case.value, now)
        if now - self._last[1] > self._limit / 3:
            self._stop()
            return self._died("hung", f"no end after {self._limit / 3:.0f} s")
        if now - self._began > self._limit:
            self._stop()
            row.note = (
                f"given up after {self._limit:.0f} s, at case {self._case.value}; give it more with --limit"
            )
            row.add(Outcome(max(self._case.value, 0), "function", "hung", "not tried from here on"))
            return self._finish()
        return None

    def _died(self, kind: str, message: str) -> Row | None:
        row = self.row
        assert row is not None
        number = self._case.value
        if number < 0:
            row.note = f"{kind} while its samples were made: {message}"
            row.add(Outcome(0, "function", kind, message))
            return self._finish()
        row.add(Outcome(number, "function", kind, message))
        self._restarts += 1
        if self._restarts >= 3:
            row.note = f"{kind} {self._restarts} times; not tried after case {number}"
            return self._finish()
        self.start(row, after=number)
        return None

    def _finish(self) -> Row:
        row, self.row = self.row, None
        assert row is not None
        row.seconds = time.monotonic() - self._began
        return row

    def _stop(self) -> int | None:
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self._process = None
        self.connection.close()
        return code  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._process is not None:
            self._stop()


def run_all(names: list[str], options: Options, workers: int, limit: float, quiet: bool) -> list[Row]:
    todo = collections.deque(names)
    done: dict[str, Row] = {}
    began = time.monotonic()
    pool = [Worker(options, limit) for _ in range(workers)]
    while len(done) < len(names):
        for one in pool:
            while one.row is None and todo:
                name = todo.popleft()
                if name in exceptions.LEFT_OUT:
                    done[name] = Row(name, note=f"left out: {exceptions.LEFT_OUT[name]}")
                else:
                    one.start(Row(name))
        busy = [one for one in pool if one.row is not None]
        wait([one.connection for one in busy], timeout=0.5)
        for one in busy:
            row = one.poll()
            if row is not None:
                done[row.op] = row
                if not quiet:
                    clock = time.strftime("%M:%S", time.gmtime(time.monotonic() - began))
                    print(
                        f"[{len(done)}/{len(names)}] {clock} {row.op}: {row.worst() or '-'} {row.note} ({row.seconds:.1f} s)",
                        flush=True,
                    )
    for one in pool:
        one.close()
    return [done[name] for name in names]


# --- what is written


def cell(counts: dict[str, int]) -> str:
    bad = [f"{kind} {counts[kind]}" for kind in reversed(KINDS) if kind != "right" and counts.get(kind)]
    if not counts:
        return "-"
    return ", ".join(bad) + f" of {sum(counts.values())}" if bad else "right"


def note_of(row: Row) -> str:
    messages = collections.Counter(
        f"{failure['kind']}: {failure['message']}"
        for failure in row.failures
        if failure["message"] != "as forward"
    )
    common = "; ".join(
        text if len(text) <= 160 else text[:157] + "..." for text, _ in messages.most_common(2)
    )
    return "; ".join(filter(None, (row.note, common))).replace("|", "\\|")


def totals_of(rows: list[Row], options: Options) -> list[str]:
    lines = []
    for mesh, gradient in COLUMNS:
        column = column_name(mesh, gradient)
        tried = [row for row in rows if row.worst(column)]
        kinds = collections.Counter(row.worst(column) for row in tried)
        lines.append(
            f"{column}: {kinds['right']} of {len(tried)} operators right"
            + "".join(f", {kinds[k]} {k}" for k in KINDS[1:] if kinds[k])
        )
    worst = collections.Counter(row.worst() for row in rows)
    trials = sum(sum(counts.values()) for row in rows for counts in row.counts.values())
    right = sum(counts.get("right", 0) for row in rows for counts in row.counts.values())
    lines.append(
        f"in all: {worst['right']} of {len(rows)} operators right"
        + "".join(f", {worst[k]} {k}" for k in KINDS[1:] if worst[k])
        + f", {worst['']} with nothing to try; {right} of {trials} checks right"
    )
    return lines


def write_table(path: Path, rows: list[Row], options: Options) -> None:
    columns = [column_name(*column) for column in COLUMNS]
    lines = [
        "# PyTorch's operator database on Tessera",
        "",
        *(f"- {line}" for line in totals_of(rows, options)),
        "",
    ]
    lines += [f"| op | {' | '.join(columns)} | notes |", "|---" * (len(columns) + 2) + "|"]
    lines += [
        f"| `{row.op}` | {' | '.join(cell(row.counts.get(column, {})) for column in columns)} | {note_of(row)} |"
        for row in rows
    ]
    path.write_text("\n".join(lines) + "\n")


def write_json(path: Path, rows: list[Row], options: Options) -> None:
    def again(row: Row, failure: dict[str, Any]) -> dict[str, Any]:
        dtype = f" --dtype {str(cases.only_dtype).removeprefix('torch.')}" if cases.only_dtype else ""
        return {
            **failure,
            "again": f"python python/op_db/run.py --op {row.op} --case {failure['case']}{dtype}",
        }

    found = [
        {**asdict(row), "worst": row.worst(), "failures": [again(row, failure) for failure in row.failures]}
        for row in rows
    ]
    path.write_text(json.dumps({"totals": totals_of(rows, options), "ops": found}, indent=1))


def run_one(name: str, number: int, options: Options) -> int:
    """One case, in this process, with all there is to know of it."""
    torch.set_num_threads(1)
    found = cases_of(name, options, only=number)
    if not found:
        print(f"{name} has no case {number}")
        return 2
    case = found[0]
    for index, (tensor, placements) in enumerate(zip(case.inputs.tensors, case.layout)):
        grad = " requires_grad" if case.inputs.requires_grad[index] else ""
        print(
            f"input {index}: {tensor.dtype}{list(tensor.shape)} strides {list(tensor.stride())}{grad} on {case.mesh}: {placements}"
        )
    print(f"called with {case.inputs}")
    outcomes: list[Outcome] = []
    errors: list[Exception] = []
    tolerance = cases.tolerance_of(cases.OPS[name], cases.dtype_of(cases.OPS[name]) or torch.float32)
    check.run_cases(
        [case],
        tolerance,
        options.gradients,
        options.timeout,
        lambda number: None,
        outcomes.append,
        errors.append,
    )
    if errors:
        traceback.print_exception(errors[0])
    for outcome in outcomes:
        print(f"{outcome.what}: {outcome.kind} {outcome.message}")
    return int(any(outcome.kind != "right" for outcome in outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--op", action="append", metavar="GLOB", help="operators to try; may be given several times"
    )
    parser.add_argument("--case", type=int, help="try this case of the one operator given, here and now")
    parser.add_argument("--mesh", action="append", choices=["4", "2,2"], help="meshes to try (both)")
    parser.add_argument(
        "--dtype", help="dtype of the samples, as in int64 (float32 where the operator supports it)"
    )
    parser.add_argument("--samples", type=int, default=8, help="samples of each operator (8)")
    parser.add_argument("--mixes", type=int, default=4, help="random layouts of each sample (4)")
    parser.add_argument("--forward-only", action="store_true", help="leave gradients out")
    parser.add_argument("--workers", type=int, default=2, help="processes at once (2)")
    parser.add_argument(
        "--limit",
        type=float,
        default=300,
        help="seconds an operator may take; a third of it for one case (300)",
    )
    parser.add_argument("--timeout", type=float, default=20, help="seconds a rank waits for another (20)")
    parser.add_argument("--output", default="build/op_db", help="where to write .md and .json (build/op_db)")
    parser.add_argument("--quiet", action="store_true", help="print the totals alone")
    arguments = parser.parse_args()
    if arguments.dtype is not None:
        cases.only_dtype = getattr(torch, arguments.dtype)
    meshes = [tuple(map(int, mesh.split(","))) for mesh in arguments.mesh or ("4", "2,2")]
    options = Options(
        arguments.samples, arguments.mixes, meshes, not arguments.forward_only, arguments.timeout
    )
    names = [
        name for name in cases.OPS if any(fnmatch.fnmatchcase(name, glob) for glob in arguments.op or ["*"])
    ]
    if not names:
        parser.error(f"no operator is called {arguments.op}")
    if arguments.case is not None:
        if len(names) != 1:
            parser.error("--case needs one operator")
        return run_one(names[0], arguments.case, options)
    began = time.monotonic()
    rows = run_all(names, options, arguments.workers, arguments.limit, arguments.quiet)
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    write_table(Path(arguments.output + ".md"), rows, options)
    write_json(Path(arguments.output + ".json"), rows, options)
    print("\n".join(totals_of(rows, options)))
    print(
        f"{time.monotonic() - began:.0f} s; {arguments.output}.md and {arguments.output}.json have the rest"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
