"""The two kernels of paged decode: one attends to a split of a context, the other joins the splits.

`paged_decode.py` launches them, and says what its launches fix when they are compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .paged_tiles import LOG2_E, attend_tiles


@triton.jit
def _tiles_of(length: tl.tensor, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """(the first position that is seen, its tile, the end of the tiles, tiles a split)."""
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
    first = lowest // TILE
    end = tl.cdiv(length, TILE)
    return lowest, first, end, tl.cdiv(end - first, SPLITS)


# Of tables and lengths no wide loads are made, so no launch is compiled by where they begin or how wide they are.
@triton.jit(do_not_specialize=["block_tables", "seq_lens", "table_row_stride"])
def _split_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
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
    partial_row_stride: tl.tensor,
    partial_head_stride: tl.tensor,
    partial_split_stride: tl.tensor,
    lse_row_stride: tl.tensor,
    lse_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Program (row, KV head and up to ROWS of its query heads, split)."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // tl.cdiv(GROUP, ROWS)).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(seq_lens + row)
    lowest, first, end, each = _tiles_of(length, TILE, SPLITS, WINDOW)
    begin = first + split * each
    end = tl.minimum(begin + each, end)
    if SPLITS > 1:
        if begin >= end:
            return
    member = tl.program_id(1) % tl.cdiv(GROUP, ROWS) * ROWS + tl.arange(0, ROWS)
    is_head = member < GROUP
    head = kv_head * GROUP + member
    key_dims = tl.arange(0, KEY_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    queries = tl.load(
        query + row * query_row_stride + (head * query_head_stride)[:, None] + key_dims[None, :],
        mask=is_head[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SPLITS == 1:
        if sinks is not None:
            maximum = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
    maximum, total, weighted = attend_tiles(
        queries,
        tl.zeros([ROWS], tl.int32) + (length - 1),
        (maximum, total, tl.zeros([ROWS, VALUE_PAD], tl.float32)),
        (begin, end),
        (lowest, length),
        block_tables + row * table_row_stride,
        (key_cache + kv_head * key_head_stride, key_block_stride, key_token_stride),
        (value_cache + kv_head * value_head_stride, value_block_stride, value_token_stride),
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
    # A row of padding has no tiles.
    result = weighted / tl.where(total == 0, 1.0, total)[:, None]
    is_stored = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
    if SPLITS == 1:
        address = output + row * output_row_stride + (head * output_head_stride)[:, None] + value_dims[None, :]
        tl.store(address, result.to(output.dtype.element_ty), mask=is_stored)
    else:
        address = partial + row * partial_row_stride + split * partial_split_stride
        address += (head * partial_head_stride)[:, None] + value_dims[None, :]
        tl.store(address, result, mask=is_stored)
        tl.store(lse + row * lse_row_stride + head * lse_head_stride + split, maximum + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["seq_lens"])
def _reduce_kernel(
    partial: tl.tensor,
    lse: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    partial_row_stride: tl.tensor,
    partial_head_stride: tl.tensor,
    partial_split_stride: tl.tensor,
    lse_row_stride: tl.tensor,
    lse_head_stride: tl.tensor,
    output_row_stride: tl.tensor,
    output_head_stride: tl.tensor,
    TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Program (row, head): joins what the used splits left, and the sink, which enters here alone."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    _, first, end, each = _tiles_of(tl.load(seq_lens + row), TILE, SPLITS, WINDOW)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, VALUE_PAD)
    is_used = splits * each < end - first
    logs = tl.load(lse + row * lse_row_stride + head * lse_head_stride + splits, mask=is_used, other=float("-inf"))
    maximum = tl.max(logs, 0)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        maximum = tl.maximum(maximum, sink)
    # Without tokens and without a sink: -inf minus -inf is NaN.
    anchor = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp2(logs - anchor)
    total = tl.sum(weights, 0) + tl.exp2(sink - anchor)
    address = partial + row * partial_row_stride + head * partial_head_stride
    parts = tl.load(
        address + (splits * partial_split_stride)[:, None] + dims[None, :],
        mask=is_used[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    address = output + row * output_row_stride + head * output_head_stride + dims
    tl.store(address, result.to(output.dtype.element_ty), mask=dims < VALUE_DIM)
