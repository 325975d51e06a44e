"""A stand-in for flash-attn on any device: the real functions' signatures and refusals, and plain sums in float64.

It refuses what the real function refuses (csrc/flash_attn/flash_api.cpp of flash-attn 2.8.3, hopper/flash_api.cpp of
flash-attn-3 3.0.0), and what would make it read out of bounds or leave a length out without a word. What the backend
never asks for (appending, rotating, dropout, ALiBi) is refused too. Memory that the real one leaves alone is NaN here.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

PAGE_TOKENS = 256


def flash_attn_module(version: str = "2.8.3.post2") -> ModuleType:
    """To be put into `sys.modules` as `flash_attn`. Its `calls` has the name of each function that was called."""
    return _module(
        "flash_attn",
        {"flash_attn_with_kvcache": with_kvcache_2, "flash_attn_varlen_func": varlen_func_2},
        __version__=version,
    )


def flash_attn_interface_module() -> ModuleType:
    """The same as `flash_attn_interface`, which is FlashAttention-3's."""
    return _module("flash_attn_interface", {"flash_attn_with_kvcache": with_kvcache_3})


def _module(name: str, functions: dict[str, Any], **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    calls: list[str] = []

    def recording(function_name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(function_name)
            output: torch.Tensor = function(*args, **kwargs)
            return output

        return call

    for function_name, function in functions.items():
        setattr(module, function_name, recording(function_name, function))
    for key, value in {**attributes, "calls": calls}.items():
        setattr(module, key, value)
    return module


def with_kvcache_2(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    _unused(k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
    _check(not return_softmax_lse and rotary_interleaved, "asked for what the backend does not need")
    _check(num_splits <= 128, "num_splits > 128 not supported")
    _check_pages(q, k_cache, v_cache, block_table)
    _check(k_cache.shape[1] % PAGE_TOKENS == 0, "Paged KV cache block size must be divisible by 256")
    _check(q.dim() == 4, "q must be [batch, seqlen, heads, dim]")
    batch, length = q.shape[:2]
    _check_ints(cache_seqlens, batch, "seqlens_k")
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
    flat = _attend(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        starts,
        cache_seqlens,
        block_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
    )
    return flat.unflatten(0, (batch, length))


def varlen_func_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    _unused(alibi_slopes)
    _check(not (dropout_p or deterministic or return_attn_probs), "asked for what the backend does not need")
    _check_pages(q, k, v, block_table)
    _check(k.shape[1] % PAGE_TOKENS == 0, "Paged KV cache block size must be divisible by 256")
    batch = block_table.shape[0]
    _check_ints(cu_seqlens_q, batch + 1, "cu_seqlens_q")
    _check_ints(cu_seqlens_k, batch + 1, "cu_seqlens_k")
    seq_lens = cu_seqlens_k.diff()
    _check(isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int), "the longest lengths must be int")
    _check(int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "queries behind max_seqlen_q are never computed")
    _check(int(seq_lens.max()) <= max_seqlen_k, "keys behind max_seqlen_k are never seen")
    return _attend(q, k, v, cu_seqlens_q, seq_lens, block_table, softmax_scale, causal, window_size, softcap)


def with_kvcache_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    _unused(k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens)
    _unused(q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa)
    unused = (attention_chunk, num_splits, sm_margin, return_softmax_lse, not rotary_interleaved)
    _check(not any(unused), "asked for what the backend does not need")
    _check_pages(q, k_cache, v_cache, page_table)
    batch = page_table.shape[0]
    _check_ints(cache_seqlens, batch, "seqused_k")
    if cu_seqlens_q is None:
        _check(q.dim() == 4 and q.shape[0] == batch, "batch_size must be equal to batch_size_k")
        cu_seqlens_q = torch.arange(0, (batch + 1) * q.shape[1], q.shape[1], dtype=torch.int32)
    else:
        _check(q.dim() == 3, "q must be [tokens, heads, dim]")
        _check(isinstance(max_seqlen_q, int), "max_seqlen_q must be provided if cu_seqlens_q is provided")
        _check_ints(cu_seqlens_q, batch + 1, "cu_seqlens_q")
        _check(int(cu_seqlens_q.diff().max()) <= max_seqlen_q, "queries behind max_seqlen_q are never computed")
    flat = q if q.dim() == 3 else q.flatten(0, 1)
    output = _attend(
        flat, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, causal, window_size, softcap
    )
    if q.dim() == 3:
        _add_what_lies_past_the_end(output, v_cache, cu_seqlens_q, cache_seqlens, page_table)
    return output.view(q.shape)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _unused(*arguments: Any) -> None:
    _check(all(argument is None for argument in arguments), "asked for what the backend does not need")


def _check_ints(tensor: Any, count: int, name: str) -> None:
    _check(isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32, f"{name} must have dtype int32")
    _check(tensor.is_contiguous(), f"{name} must be contiguous")
    _check(tensor.shape == (count,), f"{name} must have shape ({count},)")


def _check_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any) -> None:
    """q [..., heads, dim], k and v [blocks, page, kv_heads, dim], table [sequences, blocks of each]."""
    _check(isinstance(table, torch.Tensor) and table.dtype == torch.int32, "block_table must have dtype torch.int32")
    _check(table.dim() == 2 and table.stride(-1) == 1, "block_table must have contiguous last dimension")
    _check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    _check(k.dtype == q.dtype and v.dtype == q.dtype, "query, key and value must have the same dtype")
    heads, dim = q.shape[-2:]
    _check(table.shape[0] > 0, "batch size must be positive")
    _check(dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    _check(dim % 8 == 0, "head_size should be a multiple of 8")
    _check(heads % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    _check(k.shape == v.shape and k.shape[3] == dim, "k and v must have the shape of a cache of q's head dimension")
    for tensor in (q, k, v):
        _check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        # Not checked by the real one, whose copies of 16 bytes at once end the process where this does not hold.
        _check(all(stride % 8 == 0 for stride in tensor.stride()[:-1]), "rows must begin at multiples of 16 bytes")
        _check(tensor.data_ptr() % 16 == 0, "rows must begin at multiples of 16 bytes")


def _pages(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The whole pages of a sequence of that length, behind one another: [tokens, kv_heads, dim]."""
    blocks = table[: -(-length // cache.shape[1])].tolist()
    _check(length <= len(table) * cache.shape[1], "the sequence is longer than its block table")
    _check(all(0 <= block < len(cache) for block in blocks), "a block that there is not: an illegal memory access")
    return cache[blocks].flatten(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """q [tokens, heads, dim] -> the same shape; query i of n stands at position length - n + i."""
    _check(scale is not None, "the scale is not the model's own")
    assert scale is not None
    output = torch.full(q.shape, float("nan"), dtype=q.dtype)
    group = q.shape[1] // k.shape[2]
    left, right = window[0], 0 if causal else window[1]
    for row, length in enumerate(seq_lens.tolist()):
        first, end = int(starts[row]), int(starts[row + 1])
        keys, values = (
            _pages(cache, table[row], length)[:length].double().repeat_interleave(group, 1) for cache in (k, v)
        )
        distance = torch.arange(end - first).unsqueeze(1) + (length - end + first) - torch.arange(length)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance <= left
        if right >= 0:
            seen &= distance >= -right
        scores = torch.einsum("qhd,khd->hqk", q[first:end].double(), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.where(seen, scores, float("-inf")).softmax(-1)
        # A query that sees nothing gets zeros.
        weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
        output[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return output


def _add_what_lies_past_the_end(
    output: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor
) -> None:
    """The rest of each last page with weight 0, as where FlashAttention-3 copies whole tiles of pages."""
    for row, length in enumerate(seq_lens.tolist()):
        rest = _pages(v, table[row], length)[length:]
        output[int(starts[row]) : int(starts[row + 1])] += (0 * rest.sum(0)).repeat_interleave(
            output.shape[1] // v.shape[2], 0
        )
