"""Python's library: locks that it holds while a rank computes, filters of warnings, logging."""

import functools
import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from tessera import _C
from tessera._process.replaced import mutex, replace


def _share_cached_properties() -> None:
    """Before Python 3.12 a lock, one for all objects of a class, is held while the value is computed: ranks that wait for each other there
    would for ever. On ranks it is done as since then."""
    get = functools.cached_property.__get__
    missing = object()

    def unlocked(self: Any, instance: Any, owner: Any = None) -> Any:
        if (
            instance is None
            or self.attrname is None
            or not hasattr(instance, "__dict__")
            or not _C.shares_process()
        ):
            return get(self, instance, owner)
        value = instance.__dict__.get(self.attrname, missing)
        if value is missing:
            value = self.func(instance)
            instance.__dict__[self.attrname] = value
        return value

    replace(functools.cached_property, "__get__", unlocked)


def _share_warnings() -> None:
    """Filters are one for the process. When the last rank has left `warnings.catch_warnings` they are what they were before the first
    entered; each by itself would restore what it found, which may be another's."""
    enter, leave = warnings.catch_warnings.__enter__, warnings.catch_warnings.__exit__
    inside = 0
    found: list[Any] = []

    def __enter__(self: Any) -> Any:
        nonlocal inside, found
        if not _C.shares_process():
            return enter(self)
        with mutex:
            if inside == 0:
                found = [
                    warnings.filters,
                    list(warnings.filters),
                    warnings.showwarning,
                    warnings._showwarnmsg_impl,  # type: ignore[attr-defined]
                ]
            inside += 1
            return enter(self)

    def __exit__(self: Any, *exception: Any) -> None:
        nonlocal inside
        if not _C.shares_process():
            return leave(self, *exception)
        with mutex:
            leave(self, *exception)
            inside -= 1
            if inside == 0:
                warnings.filters, content, warnings.showwarning, warnings._showwarnmsg_impl = found  # type: ignore[attr-defined]
                warnings.filters[:] = content  # type: ignore[index]
                warnings._filters_mutated()  # type: ignore[attr-defined]

    replace(warnings.catch_warnings, "__enter__", __enter__)
    replace(warnings.catch_warnings, "__exit__", __exit__)


def _share_logging() -> None:
    """A handler formats what it is given with its lock held. Where that is a distributed tensor, to format it may be to wait for other ranks,
    which may wait for the lock: on ranks the message is made before."""
    handle = logging.Handler.handle

    def formatted(self: logging.Handler, record: logging.LogRecord) -> Any:
        given = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
        if _C.shares_process() and any(map(_C.is_dtensor, given)):
            record.msg, record.args = record.getMessage(), None
        return handle(self, record)

    replace(logging.Handler, "handle", functools.wraps(handle)(formatted))


def share() -> None:
    _share_warnings()
    _share_logging()
    if sys.version_info < (3, 12):
        _share_cached_properties()
