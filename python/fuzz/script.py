"""A failure as a script of its own: the functions that it needs, and the call that fails."""

import ast
import inspect
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import harness
import oracle


@dataclass(frozen=True)
class Case:
    """One computation on ranks. All of it can be printed."""

    kind: str  # a module with make(**options) and compute(made, place, out)
    options: dict[str, Any]
    mode: str
    tolerance: tuple[float, float]
    mesh: tuple[int, ...] = ()
    placements: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, str] = field(default_factory=dict)


def source(modules: list[ModuleType], wanted: list[str]) -> str:
    """The imports and definitions that `wanted` needs; of two with one name, that of the last module."""
    definitions: dict[str, str] = {}
    imports: dict[str, str] = {}
    needs: dict[str, set[str]] = {}
    local = {module.__name__ for module in modules}
    for module in modules:
        lines = inspect.getsource(module).splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.Import):
                imports |= {
                    (each.asname or each.name).split(".")[0]: f"import {ast.unparse(each)}"
                    for each in node.names
                }
            elif isinstance(node, ast.ImportFrom) and node.module not in local:
                imports |= {
                    each.asname or each.name: f"from {node.module} import {ast.unparse(each)}"
                    for each in node.names
                }
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)):
                first = min(each.lineno for each in [node, *getattr(node, "decorator_list", [])])
                text = "\n".join(lines[first - 1 : node.end_lineno])
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                for name in (
                    [node.name]
                    if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                    else [ast.unparse(each) for each in targets]
                ):
                    definitions[name] = text
                    needs[name] = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    found: set[str] = set()
    todo = set(wanted)
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= needs.get(name, set()) - found
    used = dict.fromkeys(text for name, text in definitions.items() if name in found)
    return (
        "\n".join(sorted({text for name, text in imports.items() if name in found}))
        + "\n\n\n"
        + "\n\n\n".join(used)
    )


def literal(placement: Any) -> str:
    if placement.is_partial():
        return f"Partial({placement.reduce_op!r})"
    split = f", split_factor={placement.split_factor}" if type(placement).__name__ == "_StridedShard" else ""
    return f"{type(placement).__name__}({getattr(placement, 'dim', '')}{split})"


def script(case: Case, kinds: list[ModuleType], why: str) -> str:
    """`kinds`: the module of the case and those whose functions it uses."""
    names = ["check", "make", "compute", "torch", "Partial", "Replicate", "Shard", "_StridedShard"]
    given = {
        name: ", ".join(map(literal, placements))
        for name, placements in case.placements.items()
        if placements is not None
    }
    lines = [f"        {name!r}: [{text}]," for name, text in given.items()]
    text = why.replace("\\", "/").replace('"', "'")
    return f'''"""{text}"""

from __future__ import annotations

{source([oracle, *kinds, harness], names)}


if __name__ == "__main__":
    made = make(**{case.options})
    placements = {{  # of what is distributed
{chr(10).join(lines)}
    }}
    memory = {case.memory}
    way = {{"mesh": {case.mesh}, "mode": {case.mode!r}, "tolerance": {case.tolerance}}}
    check(compute, made, **way, placements=placements, memory=memory)
'''
