"""The examples of the documentation run, and help() helps."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import tessera

ROOT = pathlib.Path(__file__).resolve().parents[2]


def examples_of(*pages):
    return [
        pytest.param(textwrap.dedent(code), id=f"{page}-{number}")
        for page in pages
        for number, code in enumerate(
            re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        )
    ]


EXAMPLES = examples_of("README.md", "docs/python.md", "docs/see.md", "docs/tutorial.md")
# These make the process a rank, so they run in one of their own, the only rank of its world.
EXAMPLES_OF_A_RANK = examples_of("docs/comm.md")


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code):
    exec(compile(code, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("code", EXAMPLES_OF_A_RANK)
def test_examples_run_on_a_rank(code):
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    code += "torch.distributed.destroy_process_group()\n"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **launcher},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr


def test_there_are_examples():
    assert len(EXAMPLES) >= 2 and len(EXAMPLES_OF_A_RANK) >= 1


def test_everything_public_is_documented():
    for module in (
        tessera,
        tessera.experimental,
        tessera.parallel,
        tessera.pipelining,
        tessera.random,
        tessera.sharded,
    ):
        assert module.__doc__
        for name in module.__all__:
            thing = getattr(module, name)
            assert thing.__doc__ and thing.__doc__.strip(), name
            if isinstance(thing, type):
                for member, value in vars(thing).items():
                    if not member.startswith("_") and (
                        callable(value) or isinstance(value, (property, staticmethod))
                    ):
                        assert value.__doc__, f"{name}.{member}"
