"""Which module is running, forward or backward."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten

from tessera import _C

GLOBAL = "Global"  # what runs outside of all modules


class ModuleTracker:
    """While entered, follows the modules that this thread calls, and their backward passes.

    Modules are named as torch names them: the class of the outermost, then the names of the attributes ("MLP.net1").
    """

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._entered = 0  # how often; inside of itself, it starts anew
        self._clear()

    def _clear(self) -> None:
        self.name = GLOBAL  # that of the module that runs now
        self.activation_checkpointing = False  # whether it runs once more, for its backward pass
        self.parents = {GLOBAL}  # the modules that run now
        self.module_helper_dict: dict[str, dict[str, Any]] = {GLOBAL: {"depth": 0}}
        self.module_parameters_dict: dict[str, dict[str, torch.Tensor]] = {}
        self.sharding_dict: dict[str, tuple[_C.Placement, ...]] = {}
        self.module_parents_dict: dict[str, set[str]] = {GLOBAL: set()}
        self.parent_dict: dict[str, list[str]] = {}  # the modules that each module called
        # What `name` and `activation_checkpointing` were before, and the hook that waits for the end.
        self._running: list[tuple[str, bool, Any]] = []
        self._ended: list[Any] = []  # hooks that have been called: torch reads its list of them meanwhile
        self._backward = -1  # the backward pass whose end will be noticed

    @property
    def is_bw(self) -> bool:
        """Whether a backward pass runs on this thread."""
        return torch._C._current_graph_task_id() != -1

    def __enter__(self) -> "ModuleTracker":
        self._remove_hooks()
        self._clear()
        self._entered += 1
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._see_outputs),
        ]
        return self

    def __exit__(self, *args: object) -> None:
        self._entered -= 1
        if self._entered == 0:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in (*self._handles, *self._ended, *(handle for _, _, handle in self._running)):
            handle.remove()
        self._handles.clear()
        self._ended.clear()
        self._running.clear()

    def _is_elsewhere(self) -> bool:
        """Whether the hook, which torch keeps for the whole process, was called on the thread of another rank."""
        return _C.is_rank_thread() and threading.get_ident() != self._thread

    def _name_of(self, module: torch.nn.Module) -> str:
        if module not in self._names:
            name = type(module).__name__
            for path, each in module.named_modules():
                self._names.setdefault(each, f"{name}.{path}" if path else name)
        return self._names[module]

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        if self._is_elsewhere():
            return
        for ended in self._ended:
            ended.remove()
        self._ended.clear()
        name = self._name_of(module)
        caller = self.name
        # Hooks of the module itself, such as those of a ParallelStyle, belong to it: this one comes after them.
        handle = module.register_forward_hook(self._end, always_call=True)
        self._running.append((caller, self.activation_checkpointing, handle))
        self.name, self.activation_checkpointing = name, self.is_bw
        if self.activation_checkpointing:
            return
        self.parents.add(name)
        self.module_parents_dict.setdefault(name, set(self.parents))
        self.parent_dict.setdefault(caller, []).append(name)
        self._describe(module, name, depth=len(self._running))
        self._when_gradients(args, lambda: self._leave_backward(name, caller), mode="all")

    def _describe(self, module: torch.nn.Module, name: str, depth: int) -> None:
        helper = self.module_helper_dict.setdefault(name, {})
        helper["module_type"] = str(type(module)).replace("<", "").replace(">", "")
        helper["depth"] = depth
        for key, parameter in module.named_parameters(recurse=False):
            data = parameter.data
            self.module_parameters_dict.setdefault(name, {})[key] = data
            if _C.is_dtensor(data):
                self.sharding_dict[f"{name}.{key}"] = _C.placements(data)
                helper.setdefault("parameters", {})[key] = str(_C.placements(data))

    def _see_outputs(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._is_elsewhere() and not self.is_bw:
            name = self._name_of(module)
            self._when_gradients(output, lambda: self._enter_backward(name), mode="any")

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._is_elsewhere() or not self._running:
            return
        if not self.activation_checkpointing:
            self.parents.discard(self.name)
        self.name, self.activation_checkpointing, handle = self._running.pop()
        self._ended.append(handle)

    def _when_gradients(self, values: Any, function: Callable[[], None], mode: str) -> None:
        """Calls the function when the gradients of all of the tensors among `values`, or of any, are there."""
        tensors = [
            each for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if tensors:
            register_multi_grad_hook(tensors, lambda *gradients: function(), mode=mode)  # type: ignore[arg-type]

    def _enter_backward(self, name: str) -> None:
        if not self._handles:
            return  # it ended before this backward pass
        task = torch._C._current_graph_task_id()
        if self._backward != task:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.name = name

    def _leave_backward(self, name: str, caller: str) -> None:
        if self._handles and self.name == name:
            self.name = caller

    def _end_backward(self) -> None:
        self._backward = -1
        self.name = GLOBAL
