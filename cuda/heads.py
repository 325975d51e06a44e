"""What a kernel does with some heads of one token: copies them, or rotates them on the way. Tiles are [heads, dims]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_heads(
    source: tl.tensor,
    source_stride: tl.tensor,
    target: tl.tensor,
    target_stride: tl.tensor,
    heads: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """`heads` int64 [HEAD_TILE]; the strides are those from head to head."""
    dims = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    mask = (heads < HEADS)[:, None] & (dims < DIM)
    entries = tl.load(source + heads[:, None] * source_stride + dims, mask=mask)
    tl.store(target + heads[:, None] * target_stride + dims, entries.to(target.dtype.element_ty), mask=mask)


@triton.jit
def rotate_heads(
    source: tl.tensor,
    source_stride: tl.tensor,
    target: tl.tensor,
    target_stride: tl.tensor,
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_TILE: tl.constexpr,
) -> None:
    """Copies heads and rotates them by cos and sin, float32 [pairs]."""
    PAIRS: tl.constexpr = ROTARY // 2
    PAIR_TILE: tl.constexpr = triton.next_power_of_2(PAIRS)
    dtype: tl.constexpr = target.dtype.element_ty
    sources = source + heads[:, None] * source_stride
    targets = target + heads[:, None] * target_stride
    cos, sin = cos[None, :], sin[None, :]
    if INTERLEAVED:
        dims = tl.arange(0, 2 * PAIR_TILE)[None, :]
        mask = (heads < HEADS)[:, None] & (dims < ROTARY)
        entries = tl.load(sources + dims, mask=mask).to(tl.float32)
        first, second = tl.split(tl.reshape(entries, (HEAD_TILE, PAIR_TILE, 2)))
        pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(targets + dims, tl.reshape(pairs, (HEAD_TILE, 2 * PAIR_TILE)).to(dtype), mask=mask)
    else:
        dims = tl.arange(0, PAIR_TILE)[None, :]
        mask = (heads < HEADS)[:, None] & (dims < PAIRS)
        first = tl.load(sources + dims, mask=mask).to(tl.float32)
        second = tl.load(sources + PAIRS + dims, mask=mask).to(tl.float32)
        tl.store(targets + dims, (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(targets + PAIRS + dims, (second * cos + first * sin).to(dtype), mask=mask)
    if ROTARY < DIM:
        copy_heads(source + ROTARY, source_stride, target + ROTARY, target_stride, heads, HEADS, DIM - ROTARY)
