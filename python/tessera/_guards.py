"""What operators on distributed tensors may do of their own accord. Per thread."""

import contextlib
from collections.abc import Iterator
from typing import Literal

from tessera import _C


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors among distributed ones are taken to be the same on all ranks, instead of being an error. Those that are written get the full value."""
    scope = _C.ImplicitReplicationScope()
    scope.enter()
    try:
        yield
    finally:
        scope.exit()


@contextlib.contextmanager
def implicit_communication(
    mode: Literal["allowed", "warned", "forbidden"], strict: bool = False
) -> Iterator[None]:
    """Inside, an operator that would move data between ranks to bring its arguments into a form it can work with may do so, warns, or is
    an error that names it, the argument and the two placements. What is asked for by name, as ``redistribute``, is always allowed.
    ``strict``: so does an operator that redistributes an argument without moving data, as by taking a slice of the local tensor.
    """
    scope = _C.ImplicitCommunicationScope(mode, strict)
    scope.enter()
    try:
        yield
    finally:
        scope.exit()


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
