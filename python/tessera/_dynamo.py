"""torch.compile leaves alone what touches a distributed tensor, which it would take for a plain one, and nothing else.

A call of a compiled function with distributed tensors runs eagerly. It stays compiled for plain ones, and so do functions of plain tensors
that it calls, such as the regions inside ``local_map``. A distributed tensor that turns up later, from a global or a parameter, breaks the
graph there.
"""

import functools
import warnings
from types import ModuleType
from typing import Any

import torch

from tessera import _C


@functools.cache
def _say_once_that_it_runs_eagerly() -> None:
    warnings.warn(
        "tessera: torch.compile does not know distributed tensors; code that touches them runs eagerly, with the same results.",
        stacklevel=2,
    )


def _holds_dtensor(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return _C.is_dtensor(value)
    if isinstance(value, torch.nn.Module):
        return any(map(_C.is_dtensor, (*value._parameters.values(), *value._buffers.values())))
    if depth > 0 and isinstance(value, (tuple, list)):
        return any(_holds_dtensor(each, depth - 1) for each in value)
    if depth > 0 and isinstance(value, dict):
        return any(_holds_dtensor(each, depth - 1) for each in value.values())
    return False


def teach_frames(convert_frame: ModuleType) -> None:
    """Called for each call of a function that no compiled code fits."""
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
    from torch._dynamo import trace_rules
    from torch._dynamo.types import ConvertFrameReturn

    wrapper: Any = convert_frame.CatchErrorsWrapper
    original = wrapper.__call__

    @functools.wraps(original)
    def __call__(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_holds_dtensor, frame.f_locals.values())):
            _say_once_that_it_runs_eagerly()
            return ConvertFrameReturn(
                frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT),
                apply_to_code=False,
                skip_reason="it was called with a distributed tensor of tessera",
            )
        return original(self, frame, *args, **kwargs)

    wrapper.__call__ = __call__
    trace_rules.add("tessera")


def teach_builder(builder: ModuleType) -> None:
    """Called for each tensor that tracing meets."""
    original = builder.VariableBuilder.wrap_tensor

    @functools.wraps(original)
    def wrap_tensor(self: Any, value: Any) -> Any:
        if _C.is_dtensor(value):
            _say_once_that_it_runs_eagerly()
            torch._dynamo.exc.unimplemented(
                gb_type="Distributed tensor of tessera",
                context=str(self.source.name),
                explanation="Operators on distributed tensors run eagerly.",
                hints=[],
            )
        return original(self, value)

    builder.VariableBuilder.wrap_tensor = wrap_tensor
