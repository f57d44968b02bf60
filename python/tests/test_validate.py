"""The sharding rules hold: a sample of what `make validate` tries in full."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "validate"))
pytest.importorskip("expecttest")

import validate  # noqa: E402

OPS = ["add", "mul", "mm", "addmm", "bmm", "sum", "mean", "var", "amax", "linalg.vector_norm", "softmax", "nn.functional.layer_norm", "nn.functional.embedding"]
OPS += ["nn.functional.nll_loss", "cat", "view", "permute", "expand", "gather", "scatter", "index_select", "where", "nn.functional.conv2d", "sort", "cumsum", "tril"]


def test_no_rule_is_false():
    verdicts = validate.validate(validate.record(OPS, samples=4, limit=4), [2, 3], progress=False)
    assert len(verdicts) > 25 and sum(verdict.rows for verdict in verdicts) > 500
    assert [f"{verdict.op}: {problem}" for verdict in verdicts for problem in verdict.false] == []


def test_a_false_rule_is_found(monkeypatch):
    """A rule that lets a partial sum through a sine."""
    honest = validate.proposal_of

    def lying(call, mesh):
        rows, decomposed = honest(call, mesh)
        lie = [((validate.Partial(),), (validate.Partial(),), 0)] if call.name == "aten::sin" else []
        return rows + lie, decomposed

    monkeypatch.setattr(validate, "proposal_of", lying)
    (verdict,) = (v for v in validate.validate(validate.record(["sin"], samples=2, limit=2), [2], progress=False) if v.op == "aten::sin")
    assert any("[P(sum)]" in problem for problem in verdict.false)
