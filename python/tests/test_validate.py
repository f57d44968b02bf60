"""The sharding rules hold: a sample of what `make validate` tries in full."""

import pathlib
import re
import subprocess
import sys

import pytest
import torch

from tessera import _C

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "validate"))
pytest.importorskip("expecttest")

import validate

OPS = [
    "add",
    "mul",
    "mm",
    "addmm",
    "bmm",
    "sum",
    "mean",
    "var",
    "amax",
    "linalg.vector_norm",
    "softmax",
    "nn.functional.layer_norm",
    "nn.functional.embedding",
]
OPS += [
    "nn.functional.nll_loss",
    "cat",
    "view",
    "permute",
    "expand",
    "gather",
    "scatter",
    "index_select",
    "where",
    "nn.functional.conv2d",
    "sort",
    "cumsum",
    "tril",
]


def test_no_rule_is_false(tmp_path):
    """In a process of its own, as it makes others."""
    command = [
        sys.executable,
        validate.__file__,
        "--samples",
        "4",
        "--calls",
        "4",
        "--output",
        str(tmp_path / "table.md"),
        "--ops",
        *OPS,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    operators, tried = (
        int(re.search(pattern, result.stdout)[1])
        for pattern in (r"(\d+) operators", r"(\d+) placements tried")
    )
    assert operators > 25 and tried > 500
    assert (tmp_path / "table.md").read_text().count("| `aten::") == operators


def test_a_false_rule_is_found(monkeypatch):
    """A rule that lets a partial sum through a sine."""
    honest = validate.proposal_of

    def lying(call, mesh):
        rows, decomposed = honest(call, mesh)
        lie = [((validate.Partial(),), (validate.Partial(),), 0)] if call.name == "aten::sin" else []
        return rows + lie, decomposed

    monkeypatch.setattr(validate, "proposal_of", lying)
    calls = validate.record(["sin"], samples=2, limit=2)
    verdict = validate.validate_one("aten::sin", calls["aten::sin"], [2])
    assert any("[P(sum)]" in problem for problem in verdict.false)


def test_nothing_is_communicated_where_torch_does_not(tmp_path):
    """A sample of what `make validate` searches, in a process of its own, as it makes others."""
    command = [sys.executable, str(pathlib.Path(validate.__file__).with_name("against_torch.py"))]
    command += [
        "--samples",
        "2",
        "--calls",
        "2",
        "--ops",
        "add",
        "maximum",
        "neg",
        "exp",
        "view",
        "mm",
        "where",
        "nn.functional.channel_shuffle",
        "nn.functional.rrelu",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_rules_of_prims_are_of_operators_that_exist():
    """Python defines them, so that the tests in C++ do not see them."""
    names = [name for name in _C.sharding_rules() if name.startswith("prims::")]
    assert len(names) > 70
    for name in names:
        assert hasattr(torch.ops.prims, name.removeprefix("prims::")), name
