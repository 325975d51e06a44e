"""RMSNorm modules, recognised by what they compute.

x / sqrt(mean(x^2) + eps) * (offset + weight), the offset being 0, or 1 as in Gemma
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from .ops import Ops
from .rewrite import Rewrites, agree, answers, is_hooked, random
from .trace import Trace

_EPSILON_NAMES: Final = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True, slots=True)
class Norm:
    """What one RMSNorm module computes."""

    ops: Ops
    weight: torch.Tensor
    eps: float
    offset: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of x + residual, which `residual` then holds."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)


def fuse_norms(modules: Iterable[nn.Module], trace: Trace, ops: Ops, rewrites: Rewrites) -> dict[nn.Module, Norm]:
    norms: dict[nn.Module, Norm] = {}
    for module in modules:
        norm = _recognised(module, trace, ops)
        if norm is not None:
            norms[module] = norm
            rewrites.set_forward(module, norm.__call__)
    return norms


def _recognised(module: Any, trace: Trace, ops: Ops) -> Norm | None:
    weight, eps = getattr(module, "weight", None), _epsilon(module)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None or is_hooked(module):
        return None
    calls = trace.of(module)
    for call in calls:
        x = call.only_input
        if (
            x is None
            or x.shape[-1:] != weight.shape
            or {x.dtype, weight.dtype} != {getattr(call.output, "dtype", None)}
        ):
            return None
    # Rows of all sizes, down to where the epsilon decides.
    rows = random(9, weight.shape[0], like=weight, dtype=torch.float32)
    rows *= 10.0 ** torch.arange(-5, 4, device=weight.device).unsqueeze(1)
    expected = answers(copy.deepcopy(module).float(), rows) if calls else None
    for offset in (0.0, 1.0):
        normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.float())
        if agree(normed, expected):
            return Norm(ops, weight, eps, offset)
    return None


def _epsilon(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in _EPSILON_NAMES)
    return next((value for value in values if isinstance(value, float)), None)
