"""What accelerate has to know: ranks that are threads have a state each, and processes on CPUs may share one model."""

import functools
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


def teach_parallelism(config: ModuleType) -> None:
    """Tensor parallelism among processes on CPUs, which it knows of GPUs only, for want of backends."""
    kind: Any = config.ParallelismConfig
    original = kind._validate_accelerator

    @functools.wraps(original)
    def _validate_accelerator(self: Any, accelerator: Any) -> None:
        on_cpus = accelerator.distributed_type == config.DistributedType.MULTI_CPU
        if on_cpus and self.tp_size > 1 and self.total_size == self.tp_size == accelerator.num_processes:
            return
        original(self, accelerator)

    kind._validate_accelerator = _validate_accelerator
