"""A sample of random operators, errors, modules and models; `make fuzz-values` runs all of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

RUN = Path(__file__).parent.parent / "fuzz" / "run.py"


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=600)


def test_a_sample_equals_one_device(tmp_path: Path) -> None:
    done = fuzz("--count", "16", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(\d+) passed, 0 failed", done.stdout, re.MULTILINE)
    assert passed and int(passed[1]) > 50, done.stdout


def test_what_fails_is_made_small_and_runs_alone(tmp_path: Path) -> None:
    """Sooner or later it draws a sharded tensor."""
    done = fuzz("--kind", "lies", "--rounds", "6", "--output", str(tmp_path))
    assert done.returncode == 1 and "alone it did not fail" not in done.stdout, done.stdout + done.stderr
    [script] = tmp_path.glob("lies_addition_*.py")
    text = script.read_text()
    assert (
        "'b': [Shard(0)],\n    }" in text
        and "'a'" not in text
        and '"mesh": (2,), "mode": \'no_grad\'' in text
    ), text
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    alone = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
    )
    assert alone.returncode == 1 and "Wrong: sum: Mismatched elements: 48 / 48" in alone.stderr, alone.stderr
