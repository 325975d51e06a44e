"""What the kernels have to compute, in float64 and as plainly as it can be said; and how far off a result is."""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: What a result may be off by, relative to the norm of its row: two roundings to its dtype; for float32 rather what the
#: sums of a long row gather.
BOUNDS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2e-5}


def row_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |result - expected| of a row (along the last dimension), relative to the row's norm.

    Infinite where the result holds what is not a number; a row that should be all zeros has to be.
    """
    if not bool(result.isfinite().all()):
        return float("inf")
    off = (result.double() - expected.double()).norm(dim=-1)
    norm = expected.double().norm(dim=-1)
    relative = torch.where(norm > 0, off / norm, torch.where(off > 0, float("inf"), 0.0))
    return float(relative.max()) if relative.numel() else 0.0


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """float64 [n, heads, value_dim], for query [n, heads, key_dim] of the last n of L tokens, key and value
    [L, kv_heads, dim].
    """
    tokens, heads, _ = query.shape
    length, kv_heads, _ = key.shape
    grouped = query.double().view(tokens, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("nkgd,lkd->nkgl", grouped, key.double()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(length - tokens, length, device=query.device).unsqueeze(1)
    distance = positions - torch.arange(length, device=query.device)
    seen = (distance >= 0) & (distance < (length if window is None else window))
    scores = scores.masked_fill(~seen[:, None, None, :], float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("nkgl,lkd->nkgd", weights, value.double()).flatten(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """x [T, heads, D], cos and sin [T, R / 2] -> float64 [T, heads, D]; the dimensions from R on pass."""
    half = cos.shape[1]
    turned, passed = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([pairs.flatten(-2), passed], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, passed], -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight.double())


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
