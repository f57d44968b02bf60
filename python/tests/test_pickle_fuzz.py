"""What pickles of placements, meshes and distributed tensors do when their arguments or bytes are not as we wrote them.

They may give what they stand for, or raise an exception that says something; never crash, hang or take memory without bound. The
inputs are tried in a process of their own, which `main` below is; `make fuzz` runs it with a million.
"""

import argparse
import faulthandler
import io
import pickle
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import tessera
from tessera import _rebuild

RANKS = 2
INTEGERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
    2**63,
    2**64,
    10**30,
]
WORDS = [
    "",
    "R",
    "S(0)",
    "SS(0, 9223372036854775807)",
    "P(sum)",
    "mesh(2)",
    "f32",
    "[",
    "](",
    "\0",
    "\udcff",
    "é",
    "x" * 5000,
]
THINGS: list[Any] = [
    None,
    True,
    1.5,
    float("nan"),
    b"S(0)",
    (),
    [],
    {},
    [[1]],
    object,
    torch.ones(2),
    torch.ones(0, 3),
]


class Wrong(BaseException):
    """Something else than a refusal that says why."""


def some(rng: random.Random) -> Any:
    return rng.choice([rng.choice(INTEGERS), rng.choice(WORDS), rng.choice(THINGS)])


def mutate_text(text: str, rng: random.Random) -> str:
    letters = list(text)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(letters) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            letters[at:at] = rng.choice(WORDS)
        elif kind == 1:
            del letters[at : at + rng.randint(1, 6)]
        elif kind == 2:
            letters[at:at] = letters[rng.randrange(len(letters) + 1) :][: rng.randint(1, 20)]
        else:
            digits = [i for i, letter in enumerate(letters) if letter.isdigit()]
            if digits:
                i = rng.choice(digits)
                letters[i : i + 1] = str(rng.choice(INTEGERS))
    return "".join(letters)


def mutate(value: Any, rng: random.Random) -> Any:
    """The same with something changed, somewhere in it."""
    if rng.randrange(8) == 0:
        return some(rng)
    if isinstance(value, str):
        return mutate_text(value, rng)
    if isinstance(value, int):
        return rng.choice(INTEGERS)
    if isinstance(value, (list, tuple)):
        items = list(value)
        kind = rng.randrange(4)
        if kind == 0 and items:
            del items[rng.randrange(len(items))]
        elif kind == 1:
            items.insert(
                rng.randrange(len(items) + 1),
                some(rng) if not items or rng.randrange(2) else rng.choice(items),
            )
        elif items:
            i = rng.randrange(len(items))
            items[i] = mutate(items[i], rng)
        return type(value)(items)
    if isinstance(value, torch.Tensor):
        return rng.choice(
            [
                value.double(),
                value[:0],
                value.reshape(-1),
                value.to("meta"),
                value.t().contiguous().t() if value.ndim == 2 else value,
                value.to_sparse(),
                value.detach().requires_grad_() if value.is_floating_point() else value,
                value.expand(3, *value.shape),
            ]
        )
    return some(rng)


def rebuild(function: Callable[..., Any], arguments: Any) -> Any:
    """What a pickle calls. What it accepts can be used, and what it refuses it refuses with words."""
    try:
        result = function(*arguments) if isinstance(arguments, (tuple, list)) else function(arguments)
        repr(result)
        if isinstance(result, tessera.DTensor):
            _ = (result.shape, result.placements, result.to_local())
            pickle.dumps(result)
        return result
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if not str(error).strip():
            raise Wrong(repr(error)) from error
        raise
    except Exception as error:
        raise Wrong(repr(error)) from error


class Ours(pickle._Unpickler):  # type: ignore[name-defined] # the one in C takes memory for any number
    """Calls what pickles of ours call, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module != "tessera._rebuild" or name not in (
            "rebuild_placement",
            "rebuild_mesh",
            "rebuild_dtensor",
        ):
            raise pickle.UnpicklingError(f"{module}.{name} is not ours")
        return lambda *arguments: rebuild(getattr(_rebuild, name), arguments)


def is_accepted(call: Callable[[], Any]) -> bool:
    try:
        call()
        return True
    except Exception:  # ours, which `rebuild` has seen, or Python's own of bytes that are no pickle
        return False


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at : at + rng.randint(1, 4)]
        else:
            out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
    return bytes(out)


def try_all(inputs: int, seed: int) -> dict[int, bool]:
    """The inputs that were accepted, by number, and whether all ranks have the same one. The pickle of a tensor has the shard of
    its rank, which may fit a shape where another's does not."""
    mesh = tessera.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("x",))
    tensors = [
        tessera.distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [tessera.Shard(0)]),
        tessera.distribute_tensor(torch.arange(5), mesh, [tessera.Replicate()]),
        tessera.distribute_tensor(torch.ones(3, 2), mesh, [tessera.Shard(1)]).requires_grad_(),
    ]
    values = [
        *(tensor.__reduce_ex__(2) for tensor in tensors),
        mesh.__reduce__(),
        *(
            placement.__reduce__()
            for placement in (tessera.Shard(0), tessera.Replicate(), tessera.Partial("avg"))
        ),
    ]
    # Tensors' own bytes are not ours: they are left out of those that are mutated.
    pickles = [
        pickle.dumps(each, protocol)
        for each in (mesh, tessera.Shard(1), tessera.Partial())
        for protocol in (2, 4)
    ]
    accepted = {}
    for i in range(inputs):
        if i % 50000 == 49999 and tessera.get_rank() == 0:
            print(f"pickles: {i + 1} of {inputs} inputs tried", file=sys.stderr, flush=True)
        rng = random.Random(f"{seed} {i}")
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            is_the_same = True
            if i % 3 == 0:
                data = mutate_bytes(rng.choice(pickles), rng)
                is_read = is_accepted(lambda data=data: Ours(io.BytesIO(data)).load())
            else:
                function, arguments = rng.choice(values)[:2]
                is_the_same = function is not _rebuild.rebuild_dtensor
                wrong = mutate(arguments, rng)
                is_read = is_accepted(lambda function=function, wrong=wrong: rebuild(function, wrong))
            if is_read:
                accepted[i] = is_the_same
        except Wrong as error:
            raise RuntimeError(f"input {i} of seed {seed}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    return accepted


def main(inputs: int, seed: int) -> None:
    faulthandler.enable()
    # Beyond what is there now.
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
    first, second = tessera.run(RANKS, lambda: try_all(inputs, seed), timeout=300)
    differ = sorted(i for i, is_the_same in (first.items() ^ second.items()) if is_the_same)
    assert not differ, f"one rank alone accepts inputs {differ[:10]} of seed {seed}"
    accepted = len(first)
    print(f"pickles: {inputs} inputs of seed {seed}, {accepted} accepted, {inputs - accepted} refused")


def test_arguments_and_bytes_of_pickles():
    done = subprocess.run(
        [sys.executable, __file__, "--inputs", "3000"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accepted, refused = map(int, re.findall(r"(\d+) (?:accepted|refused)", done.stdout))
    assert accepted > 0 and refused > 0 and accepted + refused == 3000


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pickles that nobody would write")
    parser.add_argument("--inputs", type=int, default=1000000, help="how many (1000000)")
    parser.add_argument("--seed", type=int, default=0, help="other inputs (0)")
    main(**vars(parser.parse_args()))
