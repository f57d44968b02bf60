"""Parametrizations that are cached, and hooks of all modules and optimizers: each rank has its own."""

import contextlib
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch.nn.modules.module
import torch.nn.utils.parametrize
import torch.optim.optimizer

from tessera import _C
from tessera._process.replaced import AtEnd, of_thread, replace, this_thread

module_hooks: Any = torch.nn.modules.module
optimizer_hooks: Any = sys.modules["torch.optim.optimizer"]  # torch.optim has no such attribute
parametrize: Any = torch.nn.utils.parametrize


class _OwnCount:
    """A count of scopes that are open, of each thread; true if there are any."""

    def __init__(self, outside: int) -> None:
        self.of_thread = threading.local()
        self.outside = outside  # of those who start the ranks

    def add(self, change: int) -> int:
        self.of_thread.count = getattr(self.of_thread, "count", self.outside) + change
        return int(self.of_thread.count)

    def __bool__(self) -> bool:
        return getattr(self.of_thread, "count", self.outside) > 0


class _OwnValues:
    """What torch uses of a dict, of each thread."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def get(self, key: Any) -> Any:
        return self.of_thread.__dict__.get(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.of_thread.__dict__[key] = value

    def clear(self) -> None:
        self.of_thread.__dict__.clear()


def _share_parametrization_cache() -> None:
    """`torch.nn.utils.parametrize.cached` forgets its values when no thread is inside any more: a rank that leaves, changes its weights and
    enters again would find the old ones while another is inside."""
    count, values = _OwnCount(parametrize._cache_enabled), _OwnValues()

    @contextlib.contextmanager
    def cached() -> Iterator[None]:
        count.add(1)
        try:
            yield
        finally:
            if count.add(-1) == 0:
                values.clear()

    replace(parametrize, "cached", functools.wraps(parametrize.cached)(cached))
    replace(parametrize, "_cache_enabled", count)
    replace(parametrize, "_cache", values)


class _RankHooks(OrderedDict[int, Any]):
    """Hooks of all modules, or of all optimizers: what a rank adds is for that rank alone.

    It takes the place of torch's own dict, which handles of hooks that were added before still know: what they remove there is gone here too.
    """

    def __init__(self, before: "OrderedDict[int, Any]") -> None:
        super().__init__()
        self.before, self.inherited = before, set(before)
        self.owners: dict[int, object] = {}  # the threads of hooks that ranks added
        for key, hook in before.items():
            super().__setitem__(key, hook)

    def __setitem__(self, key: int, hook: Any) -> None:
        if _C.shares_process():
            self.owners[key] = this_thread()
            if not hasattr(of_thread, "hooks"):
                of_thread.hooks = []
            of_thread.hooks.append(AtEnd(lambda: self.__delitem__(key) if key in self else None))
        super().__setitem__(key, hook)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self.owners.pop(key, None)

    def items(self) -> Any:
        thread = this_thread()
        return [
            (key, hook)
            for key, hook in list(super().items())
            if self.owners.get(key, thread) is thread and (key not in self.inherited or key in self.before)
        ]

    def keys(self) -> Any:
        return [key for key, _ in self.items()]

    def values(self) -> Any:
        return [hook for _, hook in self.items()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.keys())


def _share_hooks() -> None:
    """Once, for good: without hooks of ranks these are as torch's own."""
    for owner in (module_hooks, optimizer_hooks):
        for name, hooks in list(vars(owner).items()):
            if name.startswith("_global_") and type(hooks) is OrderedDict:
                setattr(owner, name, _RankHooks(hooks))


def share() -> None:
    _share_parametrization_cache()
    _share_hooks()
