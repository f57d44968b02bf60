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


def in_fuzzer(code: str) -> None:
    """In a process of its own, as importing the fuzzer changes PyTorch's database."""
    setup = f"import sys; sys.path[:0] = {[str(RUN.parent), str(RUN.parent.parent / 'op_db')]}\n"
    done = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_tensors_of_every_dtype_can_be_spoilt() -> None:
    in_fuzzer("""
import random, errors, torch
for dtype in (*errors.DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
    for wrong in ("dtype", "shape", "argument"):
        for seed in range(30):
            spoilt = errors.spoilt([torch.ones(3, 2).to(dtype), 1], wrong, random.Random(seed))
            assert len(spoilt) == 2
""")


def test_memory_is_left_out_only_where_one_device_is_no_measure() -> None:
    in_fuzzer("""
import random, operators, torch
image, channels = torch.ones(4, 3, 5), torch.ones(3)
def ways(way, given, tensor, name="native_batch_norm"):
    options = {"name": name, "way": way}
    return {operators.memory_of(options, given, tensor, random.Random(seed)) for seed in range(300)}
everything = {"", *operators.MEMORY}
assert ways("function", "input 0", image) == everything
misread = {"strided", "transposed", "locally strided", "locally transposed"}
assert everything - ways("out", "input 0", image) == misread
assert everything - ways("out", "input 1", channels) == {"negated", "locally negated"}
assert ways("function", "input 0", image, "nn.functional.batch_norm") == everything
""")


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
