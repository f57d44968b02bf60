"""What is one for the process, and ranks that are threads of it share: see docs/threads.md.

While such ranks run, some functions of torch and of Python's library are replaced by others, which do on a rank what is right there,
and elsewhere what they did before. Each module here has the replacements of one area, and `share`, which makes them.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from tessera import _C
from tessera._process import autograd, library, modules, replaced, sampling, settings
from tessera._process.sampling import is_computing_again as is_computing_again
from tessera._process.sampling import seed_sampler as seed_sampler

_runs = 0  # under way


def why_endless() -> str:
    """Why a rank that has been waiting for a while can never be done: called by the library, on that rank."""
    frame: Any = sys._getframe()
    while frame is not None:
        if (
            frame.f_code.co_filename == "<frozen importlib._bootstrap>"
            and frame.f_code.co_name == "_load_unlocked"
        ):
            module = getattr(frame.f_locals.get("spec"), "name", "a module")
            return (
                f"rank {_C.get_rank()} communicates while it imports {module}. A module is imported once in a process: other ranks, "
                "which are threads, wait for that and cannot take part. Communicate in a function, which all ranks call"
            )
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def shared_by_ranks() -> Iterator[None]:
    """Inside, ranks that are threads of this process run."""
    global _runs
    with replaced.mutex:
        _runs += 1
        sampling.begin_run()
        if _runs == 1:
            for area in (settings, autograd, sampling, modules, library):
                area.share()
    try:
        yield
    finally:
        with replaced.mutex:
            _runs -= 1
            if _runs == 0:
                replaced.restore()
