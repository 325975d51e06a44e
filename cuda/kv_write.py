"""Writing a step's keys and values into the paged cache, and rotating queries and keys on the way.

A slot is a token's place in the cache: block id times block size plus the offset in the block; -1 means nowhere, as
for the rows that pad a batch. Two tokens of a call never have the same slot.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from .heads import copy_heads, rotate_heads
from .strides import require_dense_rows

_ELEMENTS: Final = 1024


def _head_tile(num_heads: int, dim_tile: int) -> int:
    """How many heads a program handles: about _ELEMENTS elements."""
    return int(min(triton.next_power_of_2(num_heads), max(1, _ELEMENTS // dim_tile)))


def _warps(elements: int) -> int:
    """Eight bf16 elements a thread are 16 bytes."""
    return max(1, min(4, elements // (32 * 8)))


def kv_write_launch(num_kv_heads: int, key_dim: int, value_dim: int, block_size: int) -> dict[str, int]:
    """What `kv_write_kernel` is specialised by and launched with."""
    key_tile, value_tile = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    head_tile = _head_tile(num_kv_heads, max(key_tile, value_tile))
    return {
        "KV_HEADS": num_kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK": block_size,
        "HEAD_TILE": head_tile,
        "num_warps": _warps(head_tile * min(key_tile, value_tile)),
    }


def rope_kv_write_launch(
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    *,
    rotary_dim: int,
    interleaved: bool,
) -> dict[str, int | bool]:
    """What `rope_kv_write_kernel` is specialised by and launched with."""
    # An interleaved head rotates as one tile, one of halves as two.
    rotary_tile = triton.next_power_of_2(rotary_dim if interleaved else rotary_dim // 2)
    value_tile = triton.next_power_of_2(value_dim)
    head_tile = _head_tile(num_heads, max(triton.next_power_of_2(key_dim), value_tile))
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK": block_size,
        "ROTARY": rotary_dim,
        "INTERLEAVED": interleaved,
        "HEAD_TILE": head_tile,
        "num_warps": _warps(head_tile * min(rotary_tile, value_tile)),
    }


def kv_write(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes key [tokens, kv_heads, key_dim] and value [tokens, kv_heads, value_dim] at slots int64 [tokens].

    The caches are [blocks, kv_heads, block_size, dim]. Raises ValueError where a last dimension is not contiguous.
    """
    require_dense_rows(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=slots)
    tokens, num_kv_heads, key_dim = key.shape
    launch = kv_write_launch(num_kv_heads, key_dim, value.shape[-1], key_cache.shape[2])
    if tokens:
        kv_write_kernel[(tokens, triton.cdiv(num_kv_heads, launch["HEAD_TILE"]))](
            key,
            value,
            key_cache,
            value_cache,
            slots,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            **launch,
        )


def rope_kv_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """`kv_write` of the rotated key and of value; returns the rotated query [tokens, heads, key_dim], contiguous.

    cos and sin are [tokens, rotary_dim / 2]. Pair i of a head is (x[i], x[i + rotary_dim / 2]), or (x[2i], x[2i + 1])
    where `interleaved`; it becomes (a cos - b sin, b cos + a sin). The dims from rotary_dim on stay as they are.
    Computed in float32 and rounded once. Raises ValueError where a last dimension is not contiguous, and for more
    pairs than a head has.
    """
    require_dense_rows(
        query=query,
        key=key,
        value=value,
        cos=cos,
        sin=sin,
        key_cache=key_cache,
        value_cache=value_cache,
        slots=slots,
    )
    tokens, num_heads, key_dim = query.shape
    num_kv_heads, rotary_dim = key.shape[1], 2 * cos.shape[-1]
    if rotary_dim > key_dim:
        raise ValueError(f"{rotary_dim} dimensions of a head cannot rotate: it has {key_dim}")
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch = rope_kv_write_launch(
        num_heads,
        num_kv_heads,
        key_dim,
        value.shape[-1],
        key_cache.shape[2],
        rotary_dim=rotary_dim,
        interleaved=interleaved,
    )
    if tokens:
        parts = triton.cdiv(num_heads, launch["HEAD_TILE"]) + triton.cdiv(num_kv_heads, launch["HEAD_TILE"])
        rope_kv_write_kernel[(tokens, parts)](
            query,
            key,
            value,
            cos,
            sin,
            key_cache,
            value_cache,
            slots,
            rotated,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            **launch,
        )
    return rotated


@triton.jit
def kv_write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_stride_token: tl.tensor,
    key_stride_head: tl.tensor,
    value_stride_token: tl.tensor,
    value_stride_head: tl.tensor,
    key_cache_stride_block: tl.tensor,
    key_cache_stride_head: tl.tensor,
    key_cache_stride_offset: tl.tensor,
    value_cache_stride_block: tl.tensor,
    value_cache_stride_head: tl.tensor,
    value_cache_stride_offset: tl.tensor,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_TILE: tl.constexpr,
) -> None:
    """One token and HEAD_TILE heads a program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)).to(tl.int64)
    block, offset = slot // BLOCK, slot % BLOCK
    copy_heads(
        key + token * key_stride_token,
        key_stride_head,
        key_cache + block * key_cache_stride_block + offset * key_cache_stride_offset,
        key_cache_stride_head,
        heads,
        KV_HEADS,
        KEY_DIM,
    )
    copy_heads(
        value + token * value_stride_token,
        value_stride_head,
        value_cache + block * value_cache_stride_block + offset * value_cache_stride_offset,
        value_cache_stride_head,
        heads,
        KV_HEADS,
        VALUE_DIM,
    )


@triton.jit
def rope_kv_write_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    rotated: tl.tensor,
    query_stride_token: tl.tensor,
    query_stride_head: tl.tensor,
    key_stride_token: tl.tensor,
    key_stride_head: tl.tensor,
    value_stride_token: tl.tensor,
    value_stride_head: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    key_cache_stride_block: tl.tensor,
    key_cache_stride_head: tl.tensor,
    key_cache_stride_offset: tl.tensor,
    value_cache_stride_block: tl.tensor,
    value_cache_stride_head: tl.tensor,
    value_cache_stride_offset: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEAD_TILE: tl.constexpr,
) -> None:
    """One token and HEAD_TILE heads a program: first those of the query, then those of key and value."""
    QUERY_PARTS: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pairs = tl.arange(0, triton.next_power_of_2(ROTARY // 2))
    token_cos = tl.load(cos + token * cos_stride + pairs, mask=pairs < ROTARY // 2).to(tl.float32)
    token_sin = tl.load(sin + token * sin_stride + pairs, mask=pairs < ROTARY // 2).to(tl.float32)
    if part < QUERY_PARTS:
        heads = (part * HEAD_TILE + tl.arange(0, HEAD_TILE)).to(tl.int64)
        rotate_heads(
            query + token * query_stride_token,
            query_stride_head,
            rotated + token * HEADS * KEY_DIM,
            KEY_DIM,
            heads,
            token_cos,
            token_sin,
            HEADS,
            KEY_DIM,
            ROTARY,
            INTERLEAVED,
            HEAD_TILE,
        )
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            heads = ((part - QUERY_PARTS) * HEAD_TILE + tl.arange(0, HEAD_TILE)).to(tl.int64)
            block, offset = slot // BLOCK, slot % BLOCK
            rotate_heads(
                key + token * key_stride_token,
                key_stride_head,
                key_cache + block * key_cache_stride_block + offset * key_cache_stride_offset,
                key_cache_stride_head,
                heads,
                token_cos,
                token_sin,
                KV_HEADS,
                KEY_DIM,
                ROTARY,
                INTERLEAVED,
                HEAD_TILE,
            )
            copy_heads(
                value + token * value_stride_token,
                value_stride_head,
                value_cache + block * value_cache_stride_block + offset * value_cache_stride_offset,
                value_cache_stride_head,
                heads,
                KV_HEADS,
                VALUE_DIM,
            )
