"""What a step of training a model would cost each rank: by a dry run on tensors without values, on ranks that do not exist."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import _C
from tessera._C import StepCost

__all__ = ["StepCost", "plan_model"]

#: Makes a model on meta and distributes it; returns it with what computes the loss of a step.
Make = Callable[[_C.DeviceMesh], tuple[nn.Module, Callable[[], torch.Tensor]]]

PARALLEL = ("dp", "tp", "tp+dp", "fsdp", "fsdp+tp")


class _AsWithValues(TorchFunctionMode):
    """What would be computed with values. On meta torch composes attention of products of matrices; and conditions on values, by which
    models ask whether a batch is as usual (nothing is padded or packed), are taken to hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            result = self._flash(*args, **kwargs)
            if result is not None:
                return result
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **kwargs)

    @staticmethod
    def _flash(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        tensors = (query, key, value)
        if (
            any(_C.is_dtensor(each) or not each.is_meta or each.dim() != 4 for each in tensors)
            or dropout_p
            or query.shape[3] != value.shape[3]
        ):
            return None
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        if enable_gqa:
            repeats = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        attended: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return attended


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of matrices of plain tensors. Those of distributed ones are counted on their way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        self.total = 0.0
        self._registry = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = self._registry.get(func._overloadpacket)
        if count is not None and not any(_C.is_dtensor(each) for each in (*args, *kwargs.values())):
            self.total += count(*args, **kwargs, out_val=result)
        return result


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Of the outermost lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _sizes(mesh: str) -> dict[str, int]:
    sizes = dict(zip(*_C.parse_mesh(mesh), strict=True))
    if not sizes or not set(sizes) <= {"dp", "tp"}:
        raise ValueError(f"plan_model: expected a mesh of the dims dp and tp, as 'dp=64,tp=8', got {mesh!r}.")
    return {"dp": 1, "tp": 1} | sizes


def _config(source: Any) -> Any:
    """A config of transformers, from itself or from where it is written."""
    if not isinstance(source, (str, os.PathLike)):
        return source
    from transformers import AutoConfig

    path = os.fspath(source)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        with open(path) as file:
            values = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"plan_model: cannot read a config of transformers from {path!r}: {error}"
        ) from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"plan_model: {path!r} is no config of transformers: it names no model_type.")
    return AutoConfig.for_model(**values)


def _of_config(config: Any, parallel: str, batch: int, sequence: int, dtype: torch.dtype) -> Make:
    from tessera.parallel import fully_shard, parallelize_module, replicate

    def make(mesh: _C.DeviceMesh) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        from transformers import AutoModelForCausalLM

        dp, tp = mesh.shape
        if batch % dp:
            raise ValueError(f"plan_model: a batch of {batch} cannot be dealt to dp={dp} ranks.")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            tokens = torch.empty(batch // dp, sequence, dtype=torch.long)
        if tp > 1:
            parallelize_module(model, mesh["tp"], plan="auto", src_data_rank=None)
        if parallel.startswith("fsdp"):
            for layer in _layers(model):
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        elif dp > 1:
            replicate(model, mesh["dp"])
        return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return make


def plan_model(
    model: Any,
    mesh: str,
    *,
    parallel: str = "",
    batch: int = 0,
    sequence: int = 1024,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., torch.optim.Optimizer] | None = torch.optim.AdamW,
    rank: int = 0,
    bandwidth: Mapping[str, float] | None = None,
    latency: Mapping[str, float] | None = None,
) -> StepCost:
    """What a step of training ``model`` costs one rank of ``mesh``: memory, collectives and their bytes and time.

    Nothing is computed, and no rank runs: the model is made on meta and distributed by the same functions as always, and one step
    of it is made on ranks that do not exist. Memory is counted as tensors come and go, collectives as they are called.

        cost = plan_model("llama-70b/config.json", mesh="dp=512,tp=8", batch=1024, dtype=torch.bfloat16)
        print(cost)
        cost.memory.peak, cost.bytes, cost.communication_seconds, cost.collectives

    ``model``: a config of transformers, its ``config.json`` or its directory; or a function that is given the mesh, makes and
    distributes any model on meta, and returns it and a function that computes the loss.
    ``mesh``: as "dp=64,tp=8"; for a function with any dims.
    ``parallel``: "dp", "tp", "tp+dp", "fsdp" or "fsdp+tp"; by default what the mesh allows, sharded. Of a config, tensor parallel is by
    the plan "auto" of ``parallelize_module``, on batches of each rank of dp.
    ``batch``: rows in a step on all ranks together, by default one for each rank of dp; ``sequence``: tokens in each.
    ``optimizer``: called with the parameters; None for none.
    ``rank``: whose costs are counted.
    ``bandwidth``, ``latency``: of each mesh dim, in bytes in a second and in seconds; by default 10 GB/s and 10 us.
    """
    names = _C.parse_mesh(mesh)[0]
    make: Make
    if callable(model) and not isinstance(model, type):
        make = model
    else:
        sizes = _sizes(mesh)
        mesh, names = f"dp={sizes['dp']},tp={sizes['tp']}", ["dp", "tp"]
        usual = "fsdp" if sizes["tp"] == 1 else "tp" if sizes["dp"] == 1 else "fsdp+tp"
        parallel = parallel or usual
        if parallel not in PARALLEL:
            raise ValueError(f"plan_model: parallel is one of {', '.join(PARALLEL)}, got {parallel!r}.")
        if sizes["tp"] > 1 and "tp" not in parallel:
            raise ValueError(
                f"plan_model: tp={sizes['tp']} needs tensor parallel: parallel='tp', 'tp+dp' or 'fsdp+tp'."
            )
        make = _of_config(_config(model), parallel, batch or sizes["dp"], sequence, dtype)
    links = []
    for values, what in ((bandwidth, "bandwidth"), (latency, "latency")):
        unknown = set(values or ()) - set(names)
        if unknown:
            raise ValueError(
                f"plan_model: {what} is given for {sorted(unknown)}, but {mesh} has no such dims."
            )
    for name in names:
        per_second = (bandwidth or {}).get(name, 1e10)
        if per_second <= 0:
            raise ValueError(
                f"plan_model: the bandwidth of {name} is {per_second}; expected bytes in a second."
            )
        links.append(((latency or {}).get(name, 1e-5), 1 / per_second))
    with contextlib.ExitStack() as stack:
        run = _C.DryRunScope(mesh, rank, links)
        stack.callback(run.exit)
        made, loss = make(run.enter())
        update = optimizer(made.parameters()) if optimizer is not None else None
        stack.enter_context(_AsWithValues())

        def step() -> None:
            run.set_use("activations")
            for parameter in made.parameters():
                parameter.grad = None
            loss().backward()  # type: ignore[no-untyped-call]
            run.set_use("optimizer")
            if update is not None:
                update.step()

        step()  # makes the optimizer's states
        tensors = [*made.parameters(), *made.buffers()]
        run.begin_step(tensors)
        with _Flops() as flops:
            step()
        return run.end_step(tensors, flops.total)
