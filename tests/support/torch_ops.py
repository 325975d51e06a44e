"""The operations of a fused model in plain torch, and an attention that rotates: what fusing is tested with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from inferq.engine.attention import AttentionParams
from inferq.engine.attention.interface import Rotary
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.fusion import Ops

if TYPE_CHECKING:
    from inferq.cuda.activation import Activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    residual.add_(x)
    return rms_norm(residual, weight, eps, offset=offset)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


TORCH_OPS = Ops(rms_norm=rms_norm, add_rms_norm=add_rms_norm, gated=gated)


class RotatingAttention(ReferenceAttention):
    """The reference, which rotates what it is given unrotated; `rotations` counts that."""

    rotations = 0

    def attend_rotary(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
        rotary: Rotary,
    ) -> torch.Tensor:
        self.rotations += 1
        assert rotary.cos.stride(-1) == rotary.sin.stride(-1) == 1
        return self.attend(layer, rotate(query, rotary), rotate(key, rotary), value, params)


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """x [tokens, heads, dim], pair by pair as complex numbers."""
    pairs = rotary.cos.shape[-1]
    turn = torch.complex(rotary.cos.double(), rotary.sin.double()).unsqueeze(1)
    wide = x.to(torch.float64, copy=True)
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rotary.interleaved
        else (
            slice(0, pairs),
            slice(pairs, 2 * pairs),
        )
    )
    turned = torch.complex(wide[..., first], wide[..., second]) * turn
    wide[..., first], wide[..., second] = turned.real, turned.imag
    return wide.to(x.dtype)
