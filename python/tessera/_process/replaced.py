"""What of torch and of Python's library is replaced while ranks run, and what belongs to a thread."""

import threading
from collections.abc import Callable
from typing import Any

mutex = threading.Lock()  # never held while a rank waits for another
of_thread = threading.local()

_replaced: list[tuple[Any, str, Any]] = []  # owner, name, original

#: Called when the last run ends.
undo: list[Callable[[], Any]] = []


def replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)


def restore() -> None:
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
    while undo:
        undo.pop()()


def this_thread() -> object:
    """An object of the calling thread. Unlike `threading.get_ident()`, no later thread has the same."""
    if not hasattr(of_thread, "self"):
        of_thread.self = object()
    return of_thread.self


class AtEnd:
    """Calls a function when the thread that keeps it ends."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()
