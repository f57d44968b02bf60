"""What operators on distributed tensors may do of their own accord. Per thread."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

from tessera import _C

Level = Literal["allow", "count", "warn", "forbid"]
_LEVELS: dict[str, Level] = {"allowed": "allow", "warned": "warn", "forbidden": "forbid"}
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))
_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors among distributed ones are taken to be the same on all ranks, instead of being an error. Those that are written get the full value."""
    scope = _C.ImplicitReplicationScope()
    scope.enter()
    try:
        yield
    finally:
        scope.exit()


def _location() -> str:
    """Where the program is: the innermost line that is not in a library."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


_C.set_location_function(_location)


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if not found or found[2] not in _UNITS:
        raise ValueError(
            f'Strict: above is a number of bytes, or a text as "1 MiB" (of {", ".join(filter(None, _UNITS))}); got {size!r}.'
        )
    return int(float(found[1]) * _UNITS[found[2]])


class Strict(contextlib.AbstractContextManager["Strict"]):
    """Inside, communication that the program did not ask for is an error that shows the operator with its arguments, what would move
    and how many bytes, and the line of code that says so explicitly. What is asked for by name, as ``redistribute``, is always allowed.

        with tessera.Strict():
            model(x).sum().backward()
        with tessera.Strict("count", above="1 MiB", mesh_dims=["tp"]) as strict:
            model(x)
        print(strict)

    ``level``: "forbid"; "warn" warns once per line; "count", or "allow", says nothing. What it saw is in ``moves``. ``above``: look only at redistributions by which a rank receives more than that.
    ``mesh_dims``: only at what moves along these. ``local``: also at slices and other changes of placement that move nothing.
    :meth:`watch` does the same in each call of one module. Per thread; the innermost one counts. Without any, ``TESSERA_STRICT=1``
    (or "warn") in the environment does.
    """

    def __init__(
        self,
        level: Level = "forbid",
        *,
        above: int | str = 0,
        mesh_dims: Iterable[str | int] = (),
        local: bool = False,
    ) -> None:
        self._options = (level, local, [str(dim) for dim in mesh_dims], _bytes(above))
        _C.StrictScope(*self._options)  # refuses what makes no sense
        self._entered = threading.local()
        self._moves: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Strict":
        scope = _C.StrictScope(*self._options)
        scope.enter()
        self._scopes().append(scope)
        return self

    def __exit__(self, *exception: object) -> None:
        moves = self._scopes().pop().exit()
        with self._lock:
            for move in moves:
                key = (move.call, move.what, move.location)
                calls, size = self._moves.get(key, (0, 0))
                self._moves[key] = (calls + move.calls, size + move.bytes)

    def _scopes(self) -> list[_C.StrictScope]:
        if not hasattr(self._entered, "scopes"):
            self._entered.scopes = []
        scopes: list[_C.StrictScope] = self._entered.scopes
        return scopes

    def watch(self, module: torch.nn.Module) -> "_Watch":
        """From now on, each forward of ``module`` is inside. Returns a handle whose ``remove`` ends that. Not of backward."""
        return _Watch(self, module)

    @property
    def moves(self) -> list[dict[str, Any]]:
        """What it saw, when the scope has ended: the call, what was about to happen, the line of the program,
        how often, and the bytes that the busiest rank received."""
        return [
            {"call": call, "what": what, "location": location, "calls": calls, "bytes": size}
            for (call, what, location), (calls, size) in self._moves.items()
        ]

    @property
    def calls(self) -> int:
        """How often something was moved."""
        return sum(calls for calls, _ in self._moves.values())

    @property
    def bytes(self) -> int:
        """How many bytes the busiest rank received in all."""
        return sum(size for _, size in self._moves.values())

    def __str__(self) -> str:
        lines = [f"{self.calls} implicit moves, {self.bytes} bytes"]
        for (call, what, location), (calls, size) in sorted(
            self._moves.items(), key=lambda each: -each[1][1]
        ):
            lines.append(
                f"  {calls} times, {size} bytes: {what}\n    {call}"
                + (f"\n    {location}" if location else "")
            )
        return "\n".join(lines)


class _Watch:
    """Enters a scope before each forward of a module, and leaves it after, also where that raises."""

    def __init__(self, strict: Strict, module: torch.nn.Module) -> None:
        self._strict = strict
        self._depth = threading.local()
        self._hooks = (
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        )

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        self._strict.__enter__()
        self._depth.value = getattr(self._depth, "value", 0) + 1

    def _after(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if getattr(self._depth, "value", 0):  # else another hook raised before ours
            self._depth.value -= 1
            self._strict.__exit__()

    def remove(self) -> None:
        """The module is not watched any more."""
        for hook in self._hooks:
            hook.remove()


@contextlib.contextmanager
def implicit_communication(
    mode: Literal["allowed", "warned", "forbidden"], strict: bool = False
) -> Iterator[None]:
    """:class:`Strict` that looks at everything. ``strict``: also at what moves nothing, as a slice of the local tensor."""
    if mode not in _LEVELS:
        raise ValueError(
            f"implicit_communication: mode is one of {', '.join(map(repr, _LEVELS))}, got {mode!r}."
        )
    with Strict(_LEVELS[mode], local=strict):
        yield


def assert_placements(tensor: torch.Tensor, placements: Iterable[_C.Placement]) -> None:
    """Raises unless ``tensor`` is distributed with these placements. Communicates nothing."""
    _C.assert_placements(tensor, list(placements))


class ExplicitRedistributionContext(contextlib.AbstractContextManager["ExplicitRedistributionContext"]):
    """:func:`implicit_communication` by the name that ``torch.distributed.tensor`` has for it.

    ``enable=False`` allows it again inside another one. ``mode``: "raise" or "warn".
    ``strict``: also of redistributions that communicate nothing.
    """

    def __init__(
        self, enable: bool = True, strict: bool = False, mode: Literal["raise", "warn"] = "raise"
    ) -> None:
        if mode not in ("raise", "warn"):
            raise ValueError(f'ExplicitRedistributionContext: mode is "raise" or "warn", got {mode!r}.')
        self._mode: Literal["allowed", "warned", "forbidden"] = (
            "allowed" if not enable else "forbidden" if mode == "raise" else "warned"
        )
        self._strict = strict and enable
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> "ExplicitRedistributionContext":
        self._entered.append(implicit_communication(self._mode, self._strict))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().__exit__(None, None, None)
