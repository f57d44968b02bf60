"""What ranks spend their time with."""

import contextlib
import os

from tessera import _C


class Trace(contextlib.AbstractContextManager["Trace"]):
    """Inside, notes what this rank spends its time with: operators on distributed tensors, what they compute, redistributions,
    collectives and waiting for them, in forward and backward.

        with Trace() as trace:
            train(model)
        trace.write("trace.json")  # all ranks in one file, for Perfetto or chrome://tracing
        print(trace.summary())

    Each ``with`` starts anew. ``capacity``: how many spans a rank keeps at most, the first ones.
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        self._scope = _C.TraceScope(capacity)

    def __enter__(self) -> "Trace":
        self._scope.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._scope.stop()
        else:
            self._scope.drop()  # other ranks may never come

    def json(self) -> str:
        """All ranks' spans as JSON in the format of Chrome's traces; on rank 0, empty on others. Collective."""
        return self._scope.json()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Rank 0 writes that to a file. If it cannot, all ranks raise. Collective."""
        self._scope.write(os.fspath(path))

    def summary(self) -> str:
        """Where the time of each rank went: computing, communicating, waiting for whom, dispatching, and the rest of the program.
        The same on all ranks. Collective."""
        return self._scope.summary()
