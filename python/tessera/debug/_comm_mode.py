"""CommDebugMode, with the names, the methods and the keys of torch's."""

import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import _C
from tessera.debug._module_tracker import GLOBAL, ModuleTracker


@functools.cache
def _collectives() -> tuple[dict[str, Any], dict[Any, Any]]:
    """What a collective of ours, and one that the program calls itself, is counted as: the operator that torch counts."""
    import torch.distributed._functional_collectives
    import torch.distributed.tensor._collective_utils  # both define operators

    functional, native, c10d = torch.ops.c10d_functional, torch.ops._c10d_functional, torch.ops.c10d
    all_to_all = torch.ops._dtensor.shard_dim_alltoall
    ours = {
        "all_reduce": functional.all_reduce,
        "all_gather": functional.all_gather_into_tensor,
        "reduce_scatter": functional.reduce_scatter_tensor,
        "all_to_all": all_to_all,
        "broadcast": c10d.broadcast_,
        "scatter": c10d.scatter_,
        "reduce": c10d.reduce_,
        "gather": c10d.gather_,
        "send": c10d.send,
        "recv": c10d.recv_,
    }
    theirs = {
        all_to_all: all_to_all,
        torch.ops._c10d_functional_autograd.all_to_all_single: functional.all_to_all_single,
    }
    for name in _FUNCTIONAL:
        theirs[getattr(native, name)] = theirs[getattr(functional, name)] = getattr(functional, name)
    for name in _C10D:
        theirs[getattr(c10d, name)] = getattr(c10d, name)
    return ours, theirs


_FUNCTIONAL = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)

_C10D = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
)

_TRIVIAL = {
    "aten.detach.default",
    "aten.t.default",
    "aten.view.default",
    "aten._to_copy.default",
    "aten.as_strided.default",
    "aten.transpose.int",
}

_COLLECTIVE = "\033[1;33m"
_DETAIL = "\033[1;31m"
_PLAIN = "\033[0m"

_Counts = dict[str, dict[Any, int]]
_Operation = dict[str, Any]


def _no_counts() -> _Counts:
    return {"forward": defaultdict(int), "backward": defaultdict(int)}


def _distributed(arguments: Any) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, (list, tuple)):
            yield from _distributed(each)
        elif _C.is_dtensor(each):
            yield each


class CommDebugMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that this rank calls inside of it, whatever the cause, by operator, module and phase.

        comm_mode = CommDebugMode()
        with comm_mode:
            model(x).sum().backward()
        comm_mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
        print(comm_mode.generate_comm_debug_tracing_table())

    Collectives of distributed tensors are counted as the operators that ``torch.distributed.tensor`` uses for them, an all-to-all as
    ``torch.ops._dtensor.shard_dim_alltoall``; collectives that the program calls itself, under their own names. Each ``with``
    starts from zero. Modes may be nested: each counts all.

    ``comm_records`` has more of each collective of distributed tensors, in their order: its ``bytes`` (what this rank gave or got,
    whichever was more), the ranks of its ``group``, the ``mesh_dim`` that these are along ("dp_tp" for several; "" for groups of no mesh, or of
    one without names), the ``operator`` that called it of its own accord ("" if the program asked for it, as
    by ``redistribute``), the ``module``, and whether it was in ``backward``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True
        self.comm_counts: dict[Any, int] = defaultdict(int)
        self.comm_records: list[dict[str, Any]] = []
        self.comm_module_counts: dict[str, _Counts] = {}
        self.comm_module_operation_counts: dict[str, dict[str, list[_Operation]]] = {}
        self.advanced_module_tracker = ModuleTracker()
        self._ours, self._theirs = _collectives()
        self._observer = _C.CommObserver(self._called)

    def __enter__(self) -> "CommDebugMode":
        self.comm_counts.clear()
        self.comm_records.clear()
        self.comm_module_counts.clear()
        self.comm_module_counts[GLOBAL] = _no_counts()
        self.comm_module_operation_counts.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        self.advanced_module_tracker.__enter__()
        self._observer.enter()
        return self

    def __exit__(self, *args: Any) -> None:
        try:
            self._observer.exit()
        finally:
            self.advanced_module_tracker.__exit__()
            super().__exit__(*args)  # type: ignore[no-untyped-call]

    def get_total_counts(self) -> int:
        """How many collectives there were."""
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> dict[Any, int]:
        """How many there were of each; 0 of those that were not called."""
        return self.comm_counts

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module that ran."""
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, tuple[_C.Placement, ...]]:
        """The placements of each distributed parameter of the modules that ran, by its full name."""
        return self.advanced_module_tracker.sharding_dict

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    def get_total_bytes(self, *, implicit: bool | None = None, mesh_dim: str | None = None) -> int:
        """What this rank gave or got in all collectives of distributed tensors. ``implicit``: only in those that operators called of their
        own accord, or only in others. ``mesh_dim``: only along this one."""
        return sum(
            each["bytes"]
            for each in self.comm_records
            if (implicit is None or bool(each["operator"]) == implicit)
            and (mesh_dim is None or each["mesh_dim"] == mesh_dim)
        )

    def _called(self, name: str, size: int, operator: str, ranks: list[int], mesh_dim: str) -> None:
        if name not in self._ours:  # a barrier moves no data
            return
        self._count(self._ours[name])
        tracker = self.advanced_module_tracker
        self.comm_records.append(
            {
                "collective": name,
                "bytes": size,
                "group": tuple(ranks),
                "mesh_dim": mesh_dim,
                "operator": operator
                if "::" in operator
                else "",  # else a function of the API, as redistribute
                "module": tracker.name,
                "backward": tracker.is_bw,
            }
        )

    def _count(self, collective: Any) -> None:
        self.comm_counts[collective] += 1
        tracker = self.advanced_module_tracker
        phase = "backward" if tracker.is_bw else "forward"
        for module in {tracker.name, *tracker.module_parents_dict[tracker.name]}:
            self.comm_module_counts.setdefault(module, _no_counts())[phase][collective] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        tensors = list(_distributed(args))
        tracker = self.advanced_module_tracker
        self.comm_module_operation_counts.setdefault(tracker.name, {"operations_list": []})[
            "operations_list"
        ].append(
            {
                "name": func,
                "input_shape": [each.shape for each in tensors],
                "input_sharding": [_C.placements(each) for each in tensors],
                "device_mesh": str(_C.device_mesh(tensors[-1])) if tensors else "",
                "is_bw": tracker.is_bw,
                "is_activation_checkpointing": tracker.activation_checkpointing,
            }
        )
        if func._overloadpacket in self._theirs:
            self._count(self._theirs[func._overloadpacket])
        return func(*args, **(kwargs or {}))

    def _operations(self, module: str, noise_level: int) -> dict[str, list[_Operation]]:
        """What the module did, by phase."""
        result: dict[str, list[_Operation]] = {"forward": [], "backward": [], "checkpointing": []}
        for each in self.comm_module_operation_counts.get(module, {"operations_list": []})["operations_list"]:
            is_shown = noise_level > 2 or (
                noise_level > 0
                and str(each["name"]) not in _TRIVIAL
                and (noise_level > 1 or len(each["input_shape"]) > 0)
            )
            if is_shown:
                again = each["is_activation_checkpointing"]
                result["checkpointing" if again else "backward" if each["is_bw"] else "forward"].append(each)
        return result

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A table of what each module communicated, forward and backward.

        ``noise_level``: 0 for collectives alone; 1 for modules, their parameters, and operators on distributed tensors too; 2 for
        operators on plain tensors too; 3 for trivial ones (views, casts) too.
        """
        lines = []
        for module, helper in self.advanced_module_tracker.module_helper_dict.items():
            indent = "  " * 2 * helper["depth"]
            lines.append(f"{indent}{module}")
            if noise_level > 0 and "module_type" in helper:
                lines.append(f"{indent}*module type: {helper['module_type']}")
                if "parameters" in helper:
                    lines.append(f"{indent}*Parameter List")
                    lines += [f"{indent} *{name}: {placed}" for name, placed in helper["parameters"].items()]
            counts = self.comm_module_counts.get(module, _no_counts())
            operations = self._operations(module, noise_level)
            lines += self._phase(f"{indent}  ", "FORWARD PASS", counts["forward"], operations["forward"])
            lines += self._phase(f"{indent}  ", "BACKWARD PASS", counts["backward"], operations["backward"])
            lines += self._phase(f"{indent}  ", "ACTIVATION CHECKPOINTING", {}, operations["checkpointing"])
        return "".join(f"{line}\n" for line in lines)

    @staticmethod
    def _phase(
        indent: str, title: str, counts: dict[Any, int], operations: list[_Operation]
    ) -> Iterator[str]:
        if not counts and not operations:
            return
        yield f"{indent}{title}"
        for collective, count in counts.items():
            yield f"{_COLLECTIVE}{indent}  *{collective}: {count}{_PLAIN}"
        for each in operations:
            yield f"{_COLLECTIVE}{indent}  **{each['name']}{_PLAIN}"
            if each["input_shape"]:
                yield f"{_DETAIL}{indent}    shape: {each['input_shape']}{_PLAIN}"
                yield f"{_DETAIL}{indent}    sharding: {each['input_sharding']}{_PLAIN}"
                yield f"{_DETAIL}{indent}    device mesh: {each['device_mesh']}{_PLAIN}"

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Writes that table to a file, without colours."""
        with open(file_name, "w") as file:
            file.write(re.sub(r"\033\[[0-9;]*m", "", self.generate_comm_debug_tracing_table(noise_level)))

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Writes the same as JSON, which torch's ``comm_mode_broswer_visual.js`` draws: a tree of modules."""
        with open(file_name, "w") as file:
            json.dump(self._tree(GLOBAL, noise_level), file, indent=4)

    def _tree(self, module: str, noise_level: int) -> dict[str, Any]:
        tracker = self.advanced_module_tracker
        helper = tracker.module_helper_dict[module] if noise_level > 0 else {}
        counts = self.comm_module_counts.get(module, _no_counts())
        operations = {
            phase: [
                {
                    **each,
                    "name": str(each["name"]),
                    "input_shape": [str(shape) for shape in each["input_shape"]],
                    "input_sharding": [str(placed) for placed in each["input_sharding"]],
                }
                for each in of_phase
            ]
            for phase, of_phase in self._operations(module, noise_level).items()
        }
        return {
            "fqn": module,
            "module_type": helper.get("module_type", ""),
            "parameters": list(helper.get("parameters", {}).items()),
            "children": [self._tree(child, noise_level) for child in tracker.parent_dict.get(module, [])],
            "collectives_forward": [(str(each), count) for each, count in counts["forward"].items()],
            "collectives_backward": [(str(each), count) for each, count in counts["backward"].items()],
            "operations_forward": operations["forward"],
            "operations_backward": operations["backward"],
            "operations_checkpointing": operations["checkpointing"],
        }
