"""The programs in examples/python."""

import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"


def run(*command: str) -> str:
    result = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_generate():
    output = run(str(EXAMPLES / "generate.py"))
    for ranks in (1, 2, 4):
        assert f"world of {ranks}" in output
    assert output.count("And the mome raths outgrabe.") == 3
    assert len(re.findall(r"\d+ tokens/s", output)) == 3 and "said the same" in output
