"""The page "Coming from torch.distributed.tensor" says what is found by running both packages."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("expecttest")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date():
    """In processes of their own, as torch's ranks must not know of ours."""
    command = [sys.executable, str(ROOT / "python/validate/from_torch.py")]
    command += ["--check", str(ROOT / "docs/from_torch.md")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, (
        f"Run `make from-torch` to write it anew.\n{result.stdout}\n{result.stderr[-3000:]}"
    )
