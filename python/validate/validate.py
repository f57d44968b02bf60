"""Tries the sharding rules against the operators themselves.

Calls of operators, forward and backward, are recorded while PyTorch's operator database runs on plain tensors. Each is then asked of
the rule: every row that it claims (placements of the inputs on one mesh dim, and of the results) is tried on real ranks, with shards as uneven
as the sizes happen to be and partial values that differ from rank to rank. A row is false if the operator, given the inputs so, has to communicate, fails, or gives
another value than on whole tensors. Rows that hold by brute force on local tensors but are not offered are missing.

    python python/validate/validate.py --ops 'mm' 'sum*' --ranks 2 3

Writes a table; exits with 1 if a rule is false.
"""

import argparse
import fnmatch
import itertools
import os
import pathlib
import pickle
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tessera
from tessera import _C, Partial, Placement, Replicate, Shard

warnings.filterwarnings("ignore")

# Their values are whatever was in memory.
UNSET = {"aten::new_empty", "aten::new_empty_strided", "aten::empty_like"}

# libtorch does not check that their arguments fit together, but writes beyond them. So do those of a backward.
UNCHECKED = {"aten::lu_unpack"}


@dataclass
class Call:
    """An operator and what it was called with: plain tensors, which nothing writes to."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.op._schema.name + (
            "." + self.op._schema.overload_name if self.op._schema.overload_name else ""
        )

    def with_tensors(self, tensors: list[torch.Tensor]) -> "Call":
        flat, structure = pytree.tree_flatten((self.args, self.kwargs))
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(rest) if is_placed(leaf) else leaf for leaf in flat], structure
        )
        return Call(self.op, args, kwargs)

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if is_placed(leaf)]

    def results(self) -> list[Any]:
        return pytree.tree_leaves(self.op(*self.args, **self.kwargs))


def is_placed(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


class Recorder(TorchDispatchMode):
    """Keeps some calls, of different signatures, of each operator that has a rule and writes nothing."""

    def __init__(self, rules: set[str], limit: int) -> None:
        super().__init__()
        self.rules, self.limit = rules, limit
        self.calls: dict[str, dict[Any, Call]] = defaultdict(dict)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        call = Call(op, args, kwargs)
        has_rule = call.name in self.rules or torch.Tag.pointwise in op.tags
        known = self.calls[call.name]
        if (
            has_rule
            and len(known) < self.limit
            and not op._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in op.tags
        ):
            tensors = call.tensors()
            # A mode sees a number where the operator got it as a tensor; only tensors can be given back to it.
            unwrapped = any(
                isinstance(argument.type, torch.TensorType) and isinstance(value, (int, float, complex))
                for argument, value in zip(op._schema.arguments, args)
            )
            usable = (
                tensors
                and not unwrapped
                and all(
                    t.layout is torch.strided and not t.is_quantized and t.numel() <= 4096 for t in tensors
                )
            )
            signature = (
                *tuple((tuple(t.shape), t.dtype) for t in tensors),
                str([x for x in pytree.tree_leaves((args, kwargs)) if not is_placed(x)]),
            )
            if usable and signature not in known:
                known[signature] = call.with_tensors([t.detach().clone() for t in tensors])
        return op(*args, **kwargs)


def record(patterns: list[str], samples: int, limit: int) -> dict[str, list[Call]]:
    recorder = Recorder(set(_C.sharding_rules()) - UNSET, limit)
    for info in op_db:
        if not any(fnmatch.fnmatch(info.name, pattern) for pattern in patterns):
            continue
        dtype = (
            torch.float32
            if torch.float32 in info.supported_dtypes("cpu")
            else next(iter(info.supported_dtypes("cpu")), torch.float32)
        )
        torch.manual_seed(0)
        try:
            inputs = list(
                itertools.islice(
                    info.sample_inputs(
                        "cpu", dtype, requires_grad=info.supports_autograd and dtype.is_floating_point
                    ),
                    samples,
                )
            )
        except Exception:
            continue
        for sample in inputs:
            try:
                with recorder:
                    results = [
                        r
                        for r in pytree.tree_leaves(info.op(sample.input, *sample.args, **sample.kwargs))
                        if is_placed(r) and r.requires_grad
                    ]
                    if results:
                        torch.autograd.backward(results, [torch.randn_like(r) for r in results])
            except Exception:
                continue
    return {name: list(calls.values()) for name, calls in sorted(recorder.calls.items()) if calls}


# --- values placed on one mesh dim -----------------------------------------------------------------------------------


def parts_of(full: torch.Tensor, placement: Placement, ranks: int) -> list[torch.Tensor]:
    """What the ranks hold."""
    if isinstance(placement, Shard):
        chunks = list(full.chunk(ranks, placement.dim)) if full.shape[placement.dim] else []
        empty = full.narrow(placement.dim, 0, 0)
        return [chunk.contiguous() for chunk in chunks] + [empty.clone() for _ in range(ranks - len(chunks))]
    if isinstance(placement, Partial):
        if placement.reduce_op in ("sum", "avg"):
            generator = torch.Generator().manual_seed(full.numel())
            noise = [
                torch.randint(-4, 5, full.shape, generator=generator).to(full.dtype) for _ in range(ranks - 1)
            ]
            parts = [*noise, full - sum(noise)] if noise else [full.clone()]
            return [part * ranks for part in parts] if placement.reduce_op == "avg" else parts
        if placement.reduce_op in ("max", "min"):
            sign = 1 if placement.reduce_op == "max" else -1
            return [
                full
                - sign * ((torch.arange(full.numel()).reshape(full.shape) + rank) % ranks != 0).to(full.dtype)
                for rank in range(ranks)
            ]
        raise NotImplementedError(placement)
    return [full.clone() for _ in range(ranks)]


def can_be(tensor: torch.Tensor, placement: Placement) -> bool:
    if isinstance(placement, Shard):
        return placement.dim < tensor.ndim
    if isinstance(placement, Partial):
        if placement.reduce_op in ("max", "min"):
            return tensor.dtype.is_floating_point or (
                not tensor.dtype.is_complex and tensor.dtype is not torch.bool
            )
        return placement.reduce_op in ("sum", "avg") and (
            tensor.dtype.is_floating_point or tensor.dtype.is_complex
        )
    return True


def close(a: Any, b: Any) -> bool:
    if not is_placed(b):
        return bool(a == b)
    if not is_placed(a) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    wide = b.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    tolerance = 1e-3 if wide else 5e-2
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


# --- what rules claim ------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    op: str
    rule: str
    calls: int = 0
    rows: int = 0
    false: list[str] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)


def proposal_of(call: Call, mesh: tessera.DeviceMesh) -> tuple[list[tuple[Any, Any, int]], bool] | None:
    replicated = [_C.distribute_tensor(t, mesh, [Replicate()], None) for t in call.tensors()]
    placed = call.with_tensors(replicated)
    return _C.propose_sharding(
        call.op._schema.name, call.op._schema.overload_name, *placed.args, **placed.kwargs
    )


def try_row(call: Call, expected: list[Any], inputs: tuple[Placement, ...], ranks: int) -> str | None:
    """What is wrong with it."""

    def main() -> str | None:
        mesh = tessera.init_device_mesh("cpu", (ranks,))
        placed = []
        for tensor, placement in zip(call.tensors(), inputs):
            mine = parts_of(tensor, placement, ranks)[mesh.get_rank()]
            placed.append(_C.from_local(mine, mesh, [placement], False, list(tensor.shape), None, None))
        asked = call.with_tensors(placed)
        proposal = _C.propose_sharding(
            call.op._schema.name, call.op._schema.overload_name, *asked.args, **asked.kwargs
        )
        try:
            with tessera.implicit_communication(
                "allowed" if proposal is None or proposal[1] else "forbidden"
            ):
                results = call.with_tensors(placed).results()
        except RuntimeError as error:
            if "has to move data between ranks" not in str(error):
                raise
            results = call.with_tensors(placed).results()
        if len(results) != len(expected):
            return f"{len(results)} results instead of {len(expected)}"
        wrong = None
        for number, (ours, theirs) in enumerate(zip(results, expected)):
            full = ours.full_tensor() if isinstance(ours, tessera.DTensor) else ours
            if not close(full, theirs):
                wrong = f"result {number} is wrong"
        return wrong

    try:
        return next((problem for problem in tessera.run(ranks, main, timeout=30) if problem), None)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def text(placements: tuple[Placement, ...]) -> str:
    return "[" + ", ".join(str(p) for p in placements) + "]"


def check_claims(call: Call, expected: list[Any], verdict: Verdict, ranks: int) -> set[tuple[str, ...]]:
    """Tries all rows, and returns the inputs that are offered."""

    rows, decomposed = tessera.run(
        ranks, lambda: proposal_of(call, tessera.init_device_mesh("cpu", (ranks,)))
    )[0] or ([], False)
    offered = {tuple(str(p) for p in row[0]) for row in rows}
    candidates = [tuple(row[0]) for row in rows if not row[2] or row[2] % ranks == 0]
    if decomposed:
        offered.add(("all",))
        candidates = list(itertools.islice(itertools.product(*(options(t) for t in call.tensors())), 24))
    for inputs in dict.fromkeys(candidates):
        if not all(can_be(t, p) for t, p in zip(call.tensors(), inputs)):
            continue
        verdict.rows += 1
        problem = try_row(call, expected, inputs, ranks)
        if problem:
            shapes = ", ".join(str(list(t.shape)) for t in call.tensors())
            verdict.false.append(f"{text(inputs)} of {shapes} on {ranks} ranks: {problem}")
    return offered


# --- what they do not offer ------------------------------------------------------------------------------------------


def options(tensor: torch.Tensor) -> list[Placement]:
    shards: list[Placement] = [Shard(dim) for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
    return [Replicate(), *shards, *([Partial()] if tensor.dtype.is_floating_point else [])]


def holds(parts: list[Any], full: Any, ranks: int) -> bool:
    """Whether there is a placement of which the ranks hold these parts."""
    if not is_placed(full):
        return all(close(part, full) for part in parts)
    if not all(is_placed(part) and part.ndim == full.ndim for part in parts):
        return False
    if all(close(part, full) for part in parts):
        return True
    for dim in range(full.ndim):
        if all(close(part, chunk) for part, chunk in zip(parts, parts_of(full, Shard(dim), ranks))):
            return True
    if (
        any(part.shape != full.shape or part.dtype != full.dtype for part in parts)
        or not full.dtype.is_floating_point
    ):
        return False
    return (
        close(torch.stack(parts).sum(0), full)
        or close(torch.stack(parts).amax(0), full)
        or close(torch.stack(parts).amin(0), full)
    )


def find_missing(
    call: Call, expected: list[Any], offered: set[tuple[str, ...]], verdict: Verdict, ranks: int
) -> None:
    tensors = call.tensors()
    if ("all",) in offered or len(tensors) > 4 or "backward" in call.name or call.name in UNCHECKED:
        return
    combinations = itertools.product(*(options(t) for t in tensors))
    for inputs in itertools.islice(combinations, 200):
        if all(p.is_replicate() for p in inputs) or tuple(str(p) for p in inputs) in offered:
            continue
        if any(isinstance(p, Shard) and t.shape[p.dim] < ranks for t, p in zip(tensors, inputs)):
            continue  # empty shards make things hold that do not
        parts = [parts_of(t, p, ranks) for t, p in zip(tensors, inputs)]
        try:
            results = [call.with_tensors([part[rank] for part in parts]).results() for rank in range(ranks)]
        except Exception:
            continue
        if all(len(r) == len(expected) for r in results) and all(
            holds(list(each), full, ranks) for each, full in zip(zip(*results), expected)
        ):
            verdict.missing[text(inputs)] = verdict.missing.get(text(inputs), 0) + 1


def validate_one(name: str, recorded: list[Call], ranks: list[int]) -> Verdict:
    verdict = Verdict(name, _C.sharding_rules().get(name, "pointwise"))
    for call in recorded:
        try:
            expected = call.results()
        except Exception:
            continue
        verdict.calls += 1
        for count in ranks:
            offered = check_claims(call, expected, verdict, count)
        find_missing(call, expected, offered, verdict, ranks[-1])
    verdict.missing = {
        inputs: times for inputs, times in verdict.missing.items() if times == verdict.calls and times > 1
    }
    return verdict


def in_a_process(name: str, recorded: list[Call], ranks: list[int]) -> Verdict:
    """An operator that crashes on what a rank holds must not take the others with it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(validate_one(name, recorded, ranks), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    status = os.waitpid(child, 0)[1]
    if content and status == 0:
        return pickle.loads(content)
    return Verdict(name, _C.sharding_rules().get(name, "pointwise"), false=[f"crashed, with status {status}"])


def validate(calls: dict[str, list[Call]], ranks: list[int], progress: bool) -> list[Verdict]:
    verdicts = []
    started = time.monotonic()
    for number, (name, recorded) in enumerate(calls.items()):
        verdicts.append(in_a_process(name, recorded, ranks))
        if progress:
            print(
                f"\r{number + 1} of {len(calls)} operators, {time.monotonic() - started:.0f} s: {name:60.60}",
                end="",
                file=sys.stderr,
                flush=True,
            )
    if progress:
        print(file=sys.stderr)
    return verdicts


def report(verdicts: list[Verdict]) -> str:
    lines = [
        f"{len(verdicts)} operators with a rule, {sum(v.calls for v in verdicts)} calls, {sum(v.rows for v in verdicts)} placements tried: "
        f"{sum(bool(v.false) for v in verdicts)} rules are false, {sum(bool(v.missing) for v in verdicts)} lack placements that hold.",
        "",
        "| operator | rule | calls | placements tried | false | missing |",
        "|---|---|---|---|---|---|",
    ]
    for v in verdicts:
        false = "<br>".join(v.false[:5]) + (f"<br>and {len(v.false) - 5} more" if len(v.false) > 5 else "")
        lines.append(f"| `{v.op}` | {v.rule} | {v.calls} | {v.rows} | {false} | {'<br>'.join(v.missing)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--ops", nargs="+", default=["*"], help="names in op_db, with wildcards")
    arguments.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    arguments.add_argument("--samples", type=int, default=12, help="of each operator of op_db")
    arguments.add_argument("--calls", type=int, default=8, help="tried of each operator with a rule")
    arguments.add_argument("--output", type=pathlib.Path, help="where to write the table")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    verdicts = validate(record(chosen.ops, chosen.samples, chosen.calls), chosen.ranks, progress=True)
    table = report(verdicts)
    if chosen.output:
        chosen.output.write_text(table)
    print(table.splitlines()[0])
    for verdict in verdicts:
        for problem in verdict.false[:3]:
            print(f"false: {verdict.op}: {problem}")
        if verdict.missing:
            print(f"missing: {verdict.op}: {', '.join(verdict.missing)}")
    return 1 if any(verdict.false for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
