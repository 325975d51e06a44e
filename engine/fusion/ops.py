"""The operations that a fused model is made of; whoever fuses a model brings them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from inferq.cuda.activation import Activation


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /, *, offset: float) -> torch.Tensor:
        """x [..., width] over the root of its rows' mean square, times offset + weight [width]."""
        ...


class AddRmsNorm(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /, *, offset: float
    ) -> torch.Tensor:
        """Adds x to residual in place, and returns the norm of the sum; all [..., width]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """Each is computed in float32 inside and gives x's dtype."""

    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    #: gate_up [..., 2 * intermediate] -> activation(gate) * up [..., intermediate]; the gate is the first half.
    gated: Callable[[torch.Tensor, Activation], torch.Tensor]
