"""Paged attention of many new tokens a sequence: prompts, their chunks, and prompts of which a prefix is cached.

The rows of a program are the query heads of one KV head for some neighbouring tokens, so that a key or value that it
loads serves all of them. The tiles that every row sees whole need no mask; those at a border do. Which rows share a
program follows from the sequence alone, so a sequence's result is the same to the bit whatever its neighbours are.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .paged_tiles import INTERPRETED, LOG2_E, LaunchConfig, attend_tiles, launch_options, padded, row_bytes, tile_of
from .strides import require_dense_rows


def prefill_config(*, key_dim: int, value_dim: int, dtype: torch.dtype, block: int) -> LaunchConfig:
    """How `_prefill_kernel` is launched for blocks of `block` tokens, on the current device."""
    size = row_bytes(key_dim, value_dim, dtype)
    # Without tensor cores, as in float32, a thread holds whole operands in its registers.
    rows = 64 if dtype.itemsize < 4 else 16
    tile = tile_of(size, block)
    # What three stages take: the queries, two tiles of keys and values, and the weights of one tile. Two stages take
    # less, but before Hopper nothing is computed then while a tile comes.
    held = rows * padded(key_dim) + 2 * tile * (padded(key_dim) + padded(value_dim)) + rows * tile
    fits = INTERPRETED or held * dtype.itemsize <= _shared_bytes(triton.runtime.driver.active.get_current_device())
    return LaunchConfig(rows=rows, tile=tile, warps=4 if size <= 128 else 8, stages=3 if fits else 2)


@functools.cache
def _shared_bytes(device: int) -> int:
    """The most shared memory that a program may have: 99 KiB on cards of compute capability 8.6, 8.9 and 12."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Lets each sequence's new tokens attend to its cache, which holds them too, up to themselves.

    query [T, heads, key_dim], the sequences' new tokens behind one another; key_cache [blocks, kv_heads, block,
    key_dim] and value_cache [blocks, kv_heads, block, value_dim], of query's dtype; block_tables int32 [B, width];
    query_starts int32 [B + 1], where each sequence's tokens begin and the last one's end; seq_lens int32 [B], tokens
    with the new ones, which are the last of them; output [T, heads, value_dim]. Any strides, with a contiguous last
    dimension. Rows of no sequence and of sequences of length 0 are left as they are. `max_query_len` is at least the
    most new tokens of a sequence. For `window`, `softcap` and `sinks` see `paged_decode`.

    Raises ValueError for a last dimension with gaps.
    """
    require_dense_rows(query=query, key_cache=key_cache, value_cache=value_cache, output=output)
    heads, key_dim = query.shape[1:]
    kv_heads, block, value_dim = value_cache.shape[1:]
    group = heads // kv_heads
    config = prefill_config(key_dim=key_dim, value_dim=value_dim, dtype=query.dtype, block=block)
    _prefill_kernel[(triton.cdiv(max_query_len * group, config.rows), kv_heads, seq_lens.shape[0])](
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        seq_lens,
        sinks,
        output,
        scale,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        *output.stride()[:2],
        **launch_options(config, key_cache, value_cache, group=group, window=window, softcap=softcap),
    )


# A step's prompts begin anywhere in these arrays, and tables are as wide as the longest sequence makes them.
@triton.jit(do_not_specialize=["block_tables", "query_starts", "seq_lens", "table_row_stride"])
def _prefill_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    scale: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    table_row_stride: tl.tensor,
    output_row_stride: tl.tensor,
    output_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Program (ROWS pairs of a new token and a query head, KV head, sequence)."""
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    # The last tokens see the most: their programs start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if length <= 0 or first_row >= query_len * GROUP:
        return
    row = first_row + tl.arange(0, ROWS)
    is_row = row < query_len * GROUP
    first_position = length - query_len + first_row // GROUP
    # Rows past the end attend like the last one, and are not stored.
    positions = tl.minimum(length - query_len + row // GROUP, length - 1)
    end = tl.minimum(length - query_len + (first_row + ROWS - 1) // GROUP, length - 1) + 1
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first_position - WINDOW + 1, 0)
    token = start.to(tl.int64) + row // GROUP
    head = kv_head * GROUP + row % GROUP
    key_dims = tl.arange(0, KEY_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    queries = tl.load(
        query + (token * query_row_stride + head * query_head_stride)[:, None] + key_dims[None, :],
        mask=is_row[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        maximum = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    state = (maximum, total, tl.zeros([ROWS, VALUE_PAD], tl.float32))
    block_table = block_tables + sequence * table_row_stride
    keys = (key_cache + kv_head * key_head_stride, key_block_stride, key_token_stride)
    values = (value_cache + kv_head * value_head_stride, value_block_stride, value_token_stride)
    border = lowest // TILE
    if WINDOW == 0:
        border = (first_position + 1) // TILE
        state = attend_tiles(
            queries,
            positions,
            state,
            (0, border),
            (lowest, end),
            block_table,
            keys,
            values,
            scale,
            BLOCK,
            TILE,
            KEY_DIM,
            VALUE_DIM,
            WINDOW,
            SOFTCAP,
            False,
            UPCAST,
        )
    _, total, weighted = attend_tiles(
        queries,
        positions,
        state,
        (border, tl.cdiv(end, TILE)),
        (lowest, end),
        block_table,
        keys,
        values,
        scale,
        BLOCK,
        TILE,
        KEY_DIM,
        VALUE_DIM,
        WINDOW,
        SOFTCAP,
        True,
        UPCAST,
    )
    result = weighted / total[:, None]
    address = output + (token * output_row_stride + head * output_head_stride)[:, None] + value_dims[None, :]
    tl.store(address, result.to(output.dtype.element_ty), mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :])
