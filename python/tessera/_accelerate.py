"""The state of accelerate, which it has once for the process: one for each rank that is a thread."""

import threading
from types import ModuleType
from typing import Any

from tessera import _C


class _OfRank:
    """An attribute that each rank has for itself."""

    def __init__(self, of_process: Any) -> None:
        self._of_process = of_process
        self._of_thread = threading.local()

    def __get__(self, instance: Any, owner: type) -> Any:
        if not _C.is_rank_thread():
            return self._of_process
        return self._of_thread.__dict__.setdefault("state", {})


def teach(state: ModuleType) -> None:
    """Ranks make and reset it while others use theirs, as Trainer of transformers does."""
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        kind: Any = getattr(state, name)
        kind._shared_state = _OfRank(kind._shared_state)
