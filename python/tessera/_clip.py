"""Clipping gradients of which some are distributed and others plain, as in a model that is parallel in part: those are the same on all ranks."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from tessera import _C

_Tensors = torch.Tensor | Iterable[torch.Tensor]


def _split(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those that are distributed, and those that are not."""
    kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for tensor in tensors:
        kinds[not _C.is_dtensor(tensor)].append(tensor)
    return kinds


def install() -> None:
    module: Any = clip_grad
    norm, clip = module._get_total_norm, module._clip_grads_with_norm_

    @functools.wraps(norm)
    def _get_total_norm(
        tensors: _Tensors,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        distributed, plain = _split(given)
        if distributed and plain:
            parts = norm(distributed, norm_type, False, foreach), norm(plain, norm_type, False, foreach)
            given = [_C.full_tensor(parts[0], None), parts[1]]
        return norm(given, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]

    @functools.wraps(clip)
    def _clip_grads_with_norm_(
        parameters: _Tensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        distributed, plain = _split(given)
        if distributed and plain and _C.is_dtensor(total_norm):
            total_norm = _C.full_tensor(total_norm, None)
        for kind in (distributed, plain):
            if kind:
                clip(kind, max_norm, total_norm, foreach)

    module._get_total_norm, module._clip_grads_with_norm_ = _get_total_norm, _clip_grads_with_norm_
    torch.nn.utils.get_total_norm = _get_total_norm
    torch.nn.utils.clip_grads_with_norm_ = _clip_grads_with_norm_
