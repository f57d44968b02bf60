"""A sample of PyTorch's operator database; `make op-db` runs all of it."""

import json
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parent.parent / "op_db" / "run.py"

OPS = (
    "addmm", "amax", "bmm", "cat", "cumsum", "gather", "index_select", "masked_fill", "mean", "nn.functional.gelu",
    "nn.functional.layer_norm", "nn.functional.mse_loss", "reshape", "softmax", "sort", "sub", "sum", "transpose", "var", "where",
)  # fmt: skip


def test_operators_equal_one_device(tmp_path: Path) -> None:
    chosen = [argument for op in OPS for argument in ("--op", op)]
    command = [
        sys.executable,
        str(RUN),
        *chosen,
        "--samples",
        "4",
        "--mixes",
        "2",
        "--output",
        str(tmp_path / "op_db"),
    ]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads((tmp_path / "op_db.json").read_text())["ops"]
    assert {op["op"] for op in found} == set(OPS)
    for op in found:
        assert len(op["counts"]) == 4 and all(
            counts.get("right", 0) > 0 for counts in op["counts"].values()
        ), op
        assert op["failures"] == [], op["failures"][0]


def test_a_case_runs_alone() -> None:
    command = [sys.executable, str(RUN), "--op", "addmm", "--case", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "function: right" in done.stdout, done.stdout + done.stderr
