"""Writes the page "Coming from torch.distributed.tensor" from what it finds.

Names are looked up in both packages. Each program of PROGRAMS is run with both, on two ranks: gloo processes with torch's names, threads
with Tessera's. The page shows what came of each.

    python python/validate/from_torch.py --output docs/from_torch.md
    python python/validate/from_torch.py --check docs/from_torch.md       # exits with 1 if the page says something else
"""

import argparse
import difflib
import importlib
import inspect
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

RANKS = 2
TESTS = pathlib.Path(__file__).resolve().parents[1] / "tests"

# Modules of torch, those of ours with the same names, and their tests.
MODULES = {
    "torch.distributed.tensor": ("tessera", "test_api.py"),
    "torch.distributed.device_mesh": ("tessera", "test_mesh.py"),
    "torch.distributed.tensor.parallel": ("tessera.parallel", "test_parallel.py"),
    "torch.distributed.tensor.experimental": ("tessera.experimental", "test_api.py"),
    "torch.distributed.tensor.debug": ("tessera.debug", "test_debug.py"),
    **{
        f"torch.distributed._shard{name}": (f"tessera.sharded{name}", "test_sharded.py")
        for name in ("", ".sharded_tensor", ".sharding_spec", ".sharding_plan", ".sharder", ".sharded_optim")
    },
}


@dataclass
class Program:
    """A program of one expression, and the reason for what is different."""

    text: str
    why: str


# What the programs have besides the names of the package.
GIVEN = {
    "mesh": 'init_device_mesh("cpu", (2,))',
    "x": "distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])",
    "uneven": "distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])",
    "partial": "DTensor.from_local(torch.tensor([1.5, -2.0]), mesh, [Partial()])",
}
GATHERS = "it works where the dim is sharded too"
PROGRAMS = {
    "Works here, and is an error there": [
        Program("uneven.view(-1).full_tensor().sum().item()", "uneven shards of what is joined are redistributed"),
        Program("x.view(3, 4).placements", "what cannot stay sharded so is redistributed"),
        Program("x.unbind(0)[3].full_tensor().tolist()", GATHERS),
        Program("distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)]).squeeze(0).full_tensor().tolist()", GATHERS),
        Program("partial.clamp_(max=1).full_tensor().tolist()", "the tensor is reduced, and stays partial"),
        Program("x[x > 9].full_tensor().tolist()", "operators whose sizes depend on data give the global answer"),
        Program(
            "distribute_tensor(torch.ones(4), mesh, [Replicate()]).redistribute(mesh, [Partial()]).placements",
            "each rank keeps partial values of the sum",
        ),
        Program(
            "torch.nn.functional.embedding(distribute_tensor(torch.tensor([0, 1]), mesh, [Replicate()]), "
            "distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)]), max_norm=1.0).shape",
            "no operator is refused: at worst it takes the replicated fallback",
        ),
        Program("x.tolist()[3]", "values that Python asks for are the global tensor's"),
    ],
    "Other results": [
        Program(
            "torch.fill_(DTensor.from_local(torch.zeros(2), mesh, [Partial()]), 8).full_tensor().tolist()",
            "a tensor that is filled with 8 has the value 8, also if it has partial values",
        ),
        Program(
            "DTensor.from_local(torch.tensor([float('nan') if rank else 5.0]), mesh, [Partial('max')]).nan_to_num().full_tensor().tolist()",
            "the maximum of 5 and NaN is NaN, which becomes 0",
        ),
        Program(
            "torch.any(DTensor.from_local(torch.tensor([1.0 - 2 * rank]), mesh, [Partial()])).full_tensor().item()",
            "1 and -1 are a sum of 0",
        ),
        Program(
            "torch.nn.functional.nll_loss(distribute_tensor(torch.tensor([[-1.0, 0], [-2, 0], [-4, 0], [-8, 0]]), mesh, [Shard(0)]), "
            "distribute_tensor(torch.tensor([0, 0, 0, -100]), mesh, [Shard(0)])).full_tensor().item()",
            "ranks that ignore unlike many targets count by how many they do not ignore; here it is -(1 + 2 + 4) / 3 with its sign changed",
        ),
    ],
    "Other placements, the same values": [
        Program("x.sort(0)[0].placements", "ranks sort together; nothing is gathered"),
        Program("x.cumsum(0).placements", "each rank continues from those before it"),
        Program("x.flip(0).placements", "rows change their rank"),
        Program("x[1:].placements", "rows change their rank"),
        Program("torch.nn.functional.softmax(x, 0).placements", "two reductions instead of a gather"),
    ],
    "Other geometry": [
        Program(
            "distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])[2:].storage_offset()",
            "the offset, as the strides, is that of the global tensor",
        ),
        Program(
            "DTensor.from_local(torch.ones(8, 4).t(), mesh, [Shard(1)]).stride()",
            "ranks may hold the same values in another order: give `shape` and `stride` if all hold it so",
        ),
    ],
    "Other types": [
        Program("type(x).__name__", "`isinstance(x, DTensor)` is what tells; operators never enter Python"),
        Program("init_device_mesh('cpu', (2,)).__class__.__module__.split('.')[0]", "meshes are ours; functions take torch's too"),
    ],
}  # fmt: skip


# --- names


def public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    package = module.__name__.rpartition(".")[0] if module.__name__.count(".") > 2 else module.__name__
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and str(getattr(value, "__module__", "")).startswith(package)
        and "._ops" not in value.__module__
    ]


def parameters(value: Any) -> list[str] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    names = [each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return None if any(each.kind == each.VAR_KEYWORD for each in found) else names


def members(value: type) -> set[str]:
    own = set(dir(value)) - set(dir(torch.Tensor if issubclass(value, torch.Tensor) else object))
    own -= set(getattr(value, "__dataclass_fields__", ()))  # which are parameters
    return {name for name in own if not name.startswith("_")}


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def comparison(theirs: Any, ours: Any) -> str:
    """What is different of two things of one name, in words."""
    said = []
    before, after = parameters(theirs), parameters(ours)
    if before is not None and after is not None:
        lacking = [name for name in before if name not in after]
        more = [name for name in after if name not in before]
        said += [f"lacks the argument {listed(lacking)}"] if lacking else []
        said += [f"also takes {listed(more)}"] if more else []
    if isinstance(theirs, type) and isinstance(ours, type):
        lacking = sorted(name for name in members(theirs) if not hasattr(ours, name))
        said += [f"lacks {listed(lacking)}"] if lacking else []
    return "; ".join(said) or "the same"


def test_of(name: str, file: str) -> str:
    """The test file, or the first other one, that uses a name."""
    for path in (TESTS / file, *sorted(TESTS.glob("test_*.py"))):
        if re.search(rf"\b{re.escape(name)}\b", path.read_text()):
            return f"`{path.name}`"
    return ""


def names_table() -> list[str]:
    lines = ["| of torch | here | | test |", "|---|---|---|---|"]
    for theirs, (ours, tests) in MODULES.items():
        there, here = importlib.import_module(theirs), importlib.import_module(ours)
        for name in public_names(there):
            found = getattr(here, name, None)
            place = f"`{ours}.{name}`" if found is not None else "not here"
            said = comparison(getattr(there, name), found) if found is not None else ""
            lines.append(f"| `{theirs}.{name}` | {place} | {said} | {test_of(name, tests) if said else ''} |")
    return lines


# --- programs


def outcome(text: str, names: dict[str, Any]) -> str:
    """What a program gives, in words that do not depend on the package."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = eval(text, dict(names))
    except Exception as error:
        return type(error).__name__
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))}{',' if len(value) == 1 else ''})"
    return str(value)


def outcomes(package: ModuleType, init_device_mesh: Any, rank: int) -> list[str]:
    names: dict[str, Any] = {
        name: getattr(package, name) for name in ("DTensor", "Partial", "Replicate", "Shard")
    }
    names.update(distribute_tensor=package.distribute_tensor, init_device_mesh=init_device_mesh)
    names.update(torch=torch, rank=rank)
    found = []
    for programs in PROGRAMS.values():
        for each in programs:
            for name, text in GIVEN.items():  # anew, as a program may have changed it
                names[name] = eval(text, dict(names))
            found.append(outcome(each.text, names))
    return found


def outcomes_of_torch() -> list[str]:
    """By processes that know nothing of Tessera."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--torch", f"{folder}/store", "--rank"]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        answers = [each.communicate(timeout=300)[0] for each in processes]
        return json.loads(answers[0].splitlines()[-1])


def run_with_torch(store: str, rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    print(json.dumps(outcomes(tensor, init_device_mesh, rank)), flush=True)
    dist.destroy_process_group()


def differences() -> list[str]:
    import tessera

    there = iter(outcomes_of_torch())
    here = iter(
        tessera.run(RANKS, lambda: outcomes(tessera, tessera.init_device_mesh, tessera.get_rank()))[0]
    )
    lines = []
    for title, programs in PROGRAMS.items():
        lines += ["", f"### {title}", "", "| program | there | here | why |", "|---|---|---|---|"]
        for each in programs:
            theirs, ours = next(there), next(here)
            if theirs == ours:
                raise SystemExit(
                    f"Both packages give {ours} for this program: take it out of PROGRAMS.\n    {each.text}"
                )
            text = each.text.replace("|", "\\|")
            lines.append(f"| `{text}` | {theirs} | {ours} | {each.why} |")
    return lines


HEAD = """# Coming from torch.distributed.tensor

<!-- Written by python/validate/from_torch.py from what it finds. Do not edit: run `make from-torch`. -->

Change the import, and the program runs: `from tessera import ...` for `from torch.distributed.tensor import ...` and
`from torch.distributed.device_mesh import ...`, `tessera.parallel` for `torch.distributed.tensor.parallel`, and so on
by the table of [names](#names). All of this page was found by looking the names up in both packages, and by running
the programs below on two ranks with each (torch {version}).

The programs have `rank`, 0 or 1, and these; the tables say what rank 0 sees:

{given}

## What is different
"""

COMMUNICATION = """### Communication

`make validate` searches for calls that communicate here and, by torch's propagation, not there. It finds none.

These operators are left out, as torch's answer is wrong for some values:"""

NAMES = """## Names

All public names of torch's modules. [python.md](python.md#private-names-that-libraries-use) has the private ones that
libraries use."""


def communication() -> list[str]:
    from against_torch import EXCEPTIONS, PARTLY

    reasons = EXCEPTIONS | {name: f"in some calls: {why}" for name, (why, _) in PARTLY.items()}
    lines = [*COMMUNICATION.splitlines(), "", "| operators | why |", "|---|---|"]
    for why in dict.fromkeys(reasons.values()):
        names = [name.removeprefix("aten::") for name in reasons if reasons[name] == why]
        lines.append(f"| {listed(names)} | {why} |")
    return lines


def page() -> str:
    given = "\n".join(f"    {name} = {text}" for name, text in GIVEN.items())
    lines = HEAD.format(version=torch.__version__.partition("+")[0], given=given).splitlines()
    lines += [*differences(), "", *communication()]
    lines += ["", *NAMES.splitlines(), "", *names_table()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=pathlib.Path, help="where to write the page")
    parser.add_argument("--check", type=pathlib.Path, help="a page to compare with")
    parser.add_argument("--torch", metavar="STORE", help="run the programs with torch's package")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.torch:
        run_with_torch(options.torch, options.rank)
        return 0
    text = page()
    if options.output:
        options.output.write_text(text)
    if options.check:
        now = options.check.read_text()
        sys.stdout.writelines(
            difflib.unified_diff(now.splitlines(True), text.splitlines(True), str(options.check), "found")
        )
        return int(now != text)
    if not options.output:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
