"""Modules of PyTorch's database, every tensor placed at random: results, buffers, double gradients."""

import copy
import random
from typing import Any

import torch
from harness import Out, Place, differentiate
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.utils import _pytree as pytree

from tessera import DTensor

USES: list[Any] = []
MODULES = {info.name: info for info in module_db}
NAMES = list(MODULES)
MODES = ("gradients", "gradients", "gradients", "no_grad", "inference_mode", "autocast")


def draw(
    name: str, rng: random.Random, modes: tuple[str, ...] = MODES
) -> tuple[dict[str, Any], str, tuple[float, float]]:
    """(options, mode, tolerance)"""
    has_errors = MODULES[name].module_error_inputs_func is not None
    options = {
        "name": name,
        "number": rng.randrange(1000),
        "dtype": rng.choice([torch.float64, torch.float64, torch.float32]),
        "training": rng.choice([True, False]),
        "wrong": has_errors and rng.random() < 0.3,
        "seed": rng.randrange(1000),
    }
    mode = rng.choice(modes)
    tolerance = (
        (0.1, 0.1)
        if mode == "autocast"
        else (1e-6, 1e-7)
        if options["dtype"] is torch.float64
        else (1e-3, 1e-4)
    )
    return options, mode, tolerance


def make(name: str, number: int, dtype: torch.dtype, training: bool, wrong: bool, seed: int) -> Any:
    info = next(info for info in module_db if info.name == name)
    torch.manual_seed(seed)
    function = info.module_error_inputs_func if wrong else info.module_inputs_func
    inputs = function(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    if wrong:
        inputs = [
            each.module_error_input for each in inputs if each.error_on is ModuleErrorEnum.FORWARD_ERROR
        ]
    if not inputs:
        return None
    given = inputs[number % len(inputs)]
    module = (
        info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        .to(dtype)
        .train(training)
    )
    args, kwargs = given.forward_input.args, given.forward_input.kwargs
    with torch.no_grad():
        if info.is_lazy:
            module(*args, **kwargs)
        for parameter in module.parameters():  # biases are zero, weights of norms are one
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module, args, kwargs, 2


def compute(made: Any, place: Place, out: Out) -> None:
    if made is None:
        return
    module, args, kwargs, orders = made
    module = copy.deepcopy(module)
    tensors = distribute(module, place)
    are_plain = {name: not isinstance(buffer, DTensor) for name, buffer in module.named_buffers()}
    leaves, structure = pytree.tree_flatten((args, kwargs))
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[number] = tensors[f"input {number}"] = place(f"input {number}", leaf)
    takes_distributed = any(isinstance(leaf, DTensor) for leaf in leaves)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    results = [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    for number, leaf in enumerate(results):
        out(f"result {number}", leaf, not takes_distributed)
    for name, buffer in module.named_buffers():
        out(name, buffer, are_plain.get(name, False))
    differentiate(results, tensors, orders, place, out)


def distribute(module: torch.nn.Module, place: Place) -> dict[str, torch.Tensor]:
    """Places the parameters and buffers, which it returns. What several submodules share stays shared."""
    placed: dict[torch.Tensor, torch.Tensor] = {}
    names: dict[str, torch.Tensor] = {}
    for path, owner in module.named_modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is None:
                continue
            if tensor not in placed:
                found = place(f"{path}.{name}", tensor)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                placed[tensor] = (
                    torch.nn.Parameter(found.detach(), requires_grad=tensor.requires_grad)
                    if is_parameter
                    else found
                )
                names[f"{path}.{name}"] = placed[tensor]
            setattr(owner, name, placed[tensor])
    return names
