"""Models of the transformers package, read from and written to directories of Hugging Face, each rank its own part."""

import os
import re
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tessera import _C, checkpoint
from tessera._api import _mesh
from tessera._C import DeviceMesh
from tessera.parallel.api import parallelize_module
from tessera.parallel.auto import has_local_experts

__all__ = ["from_pretrained", "save_pretrained"]


class _Views(TorchFunctionMode):
    """Inside, `contiguous` copies nothing, so that what is split from a tensor shares its memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _as_in_files(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names that they have in files, where what is one for the model may be many: views of the model's memory."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad(), _Views():
        return revert_weight_conversion(model, {name: each.detach() for name, each in tensors.items()})  # type: ignore[no-any-return]


def _state(model: nn.Module, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """What this rank has of the model, by the names that it has in files. A tensor that is shared is there once."""
    own: dict[str, torch.Tensor] = {}  # of experts that other ranks do not have
    for path, module in model.named_modules():
        if has_local_experts(module):
            own |= {
                f"{path}.{name}": each
                for name, each in module.named_parameters(recurse=False)
                if _C.is_dtensor(each)
            }
    saved = model.state_dict()
    others: dict[str, torch.Tensor] = {
        name: each for name, each in model.named_parameters() if name not in own
    }
    others |= {name: each for name, each in model.named_buffers() if name in saved}
    state = _as_in_files(model, others)
    first = mesh.get_local_rank() if own else 0
    for name, parameter in own.items():
        local = _C.local_tensor(parameter)
        parts = _as_in_files(model, {name: local})
        if name in parts:  # one tensor in files too
            state[name] = parameter
        for part, tensor in parts.items():
            if part != name:
                state[_numbered_from(part, first * len(local))] = tensor
    return state


def _numbered_from(name: str, first: int) -> str:
    return re.sub(r"(?<=experts\.)\d+(?=\.)", lambda number: str(int(number[0]) + first), name)


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def _dtypes(path: str) -> Iterator[tuple[str, torch.dtype | None]]:
    """Those of the tensors in a directory, by their names."""
    from safetensors import safe_open

    for file in sorted(os.listdir(path)):
        if file.endswith(".safetensors"):
            with safe_open(os.path.join(path, file), framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, _DTYPES.get(tensors.get_slice(name).get_dtype())


def from_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    device_mesh: DeviceMesh | None = None,
    plan: Literal["auto", "experts"] = "auto",
    *,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Any:
    """The model that ``model_class.from_pretrained(path)`` makes, parallel: each rank allocates and reads only its part.

    ``model_class``: of transformers, such as ``AutoModelForCausalLM``. ``path``: a directory as ``save_pretrained`` writes it.
    ``plan``: see :func:`parallelize_module`. ``dtype``: by default what the directory's config says. Other arguments go to the model's
    config, such as ``attn_implementation="eager"``.

        model = tessera.parallel.from_pretrained(transformers.AutoModelForCausalLM, "llama", mesh)
        model.generate(tokens)
    """
    from transformers import AutoConfig, GenerationConfig

    mesh = _mesh(device_mesh)
    directory = os.fspath(path)
    if not os.path.isdir(directory):
        raise ValueError(
            f"from_pretrained: there is no directory {directory!r}. A model of the hub is downloaded first, with "
            "huggingface_hub.snapshot_download, which returns the directory."
        )
    config = AutoConfig.from_pretrained(directory, **kwargs)
    make = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    with torch.device("meta"):
        model = make(config, **({} if dtype is None else {"dtype": dtype}))
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.to_empty(device=mesh.device_type)
    model.tie_weights()
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()  # buffers that are in no file, such as frequencies of rotary embeddings
    state = _state(model, mesh)
    stored = dict(_dtypes(directory))
    converted = {
        name: tensor
        for name, tensor in state.items()
        if name in stored and stored[name] is not None and stored[name] != tensor.dtype
    }
    state |= {name: torch.empty_like(tensor, dtype=stored[name]) for name, tensor in converted.items()}
    missing = checkpoint.load(state, directory, strict=False).missing
    if missing:
        raise ValueError(
            f"from_pretrained: {directory!r} lacks {len(missing)} tensors of {type(model).__name__}: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}."
        )
    with torch.no_grad():
        for name, tensor in converted.items():
            tensor.copy_(state[name])
    if model.can_generate() and os.path.exists(os.path.join(directory, "generation_config.json")):
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


def save_pretrained(model: Any, path: str | os.PathLike[str], device_mesh: DeviceMesh | None = None) -> None:
    """Write a parallel model as ``model.save_pretrained(path)`` would a plain one. All ranks call it together; each writes its part."""
    mesh = _mesh(device_mesh) if device_mesh is not None else mesh_of(model)
    checkpoint.save(_state(model, mesh), path, format="huggingface")
    if mesh.get_rank() == mesh.mesh.flatten()[0]:
        config = model.config
        config.architectures = [
            next(
                kind.__name__
                for kind in type(model).__mro__
                if not kind.__name__.startswith(("Parallel", "Replicated"))
            )
        ]
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)


def mesh_of(model: nn.Module) -> DeviceMesh:
    """That of the model's first distributed parameter."""
    for parameter in model.parameters():
        if _C.is_dtensor(parameter):
            return _C.device_mesh(parameter)
    raise ValueError(
        f"save_pretrained: {type(model).__name__} has no distributed parameter; use its own save_pretrained."
    )
