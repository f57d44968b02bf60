"""The examples of the documentation run, and help() helps."""

import pathlib
import re
import textwrap

import pytest

import tessera

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = [
    pytest.param(textwrap.dedent(code), id=f"{page}-{number}")
    for page in ("README.md", "docs/python.md", "docs/see.md", "docs/tutorial.md")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code):
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


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
