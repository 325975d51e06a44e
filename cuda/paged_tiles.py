"""What the paged attention kernels share: the walk over a sequence's pages, one tile of its tokens at a time.

The softmax is computed on line, as in "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018) and
FlashAttention-2 (Dao, 2023), in powers of two: scores carry a factor log2(e). Knows nothing of who launches it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E: Final = tl.constexpr(1.4426950408889634)

#: True where Triton's interpreter runs the kernels. It computes `tl.dot` wrongly in bfloat16, without a word.
INTERPRETED: Final = bool(triton.knobs.runtime.interpret)

#: `tl.dot` takes no operand with a side shorter than this.
MIN_SIDE: Final = 16

MAX_TILE: Final = 64
#: Of the keys, and of the values, of a tile. The pipeline holds two of each, 64 KiB: three such decode programs share a
#: multiprocessor of an H100.
MAX_TILE_BYTES: Final = 16 * 1024


class LaunchConfig(NamedTuple):
    """How an attention kernel is launched: query rows a program, tokens a tile, warps, and stages of the pipeline."""

    rows: int
    tile: int
    warps: int
    stages: int


def padded(size: int) -> int:
    """The side of a tile that holds `size` numbers."""
    return max(MIN_SIDE, int(triton.next_power_of_2(size)))


def row_bytes(key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """What the longer of a key and a value takes in shared memory."""
    return padded(max(key_dim, value_dim)) * dtype.itemsize


def tile_of(row_size: int, block: int) -> int:
    """Tokens a tile, for rows of `row_size` bytes and blocks of `block` tokens: a power of two.

    One that divides the block where that is not too small: a tile in one block needs one block id, loaded as a scalar.
    """
    largest = min(MAX_TILE, max(MIN_SIDE, MAX_TILE_BYTES // row_size))
    dividing = min(block & -block, largest)
    return dividing if 2 * dividing >= largest else largest


def launch_options(
    config: LaunchConfig,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    group: int,
    window: int | None,
    softcap: float | None,
) -> dict[str, Any]:
    """What a launch of a kernel with `attend_tiles` fixes when it is compiled, and how many warps and stages it has."""
    key_dim, value_dim = key_cache.shape[3], value_cache.shape[3]
    return {
        "GROUP": group,
        "ROWS": config.rows,
        "BLOCK": key_cache.shape[2],
        "TILE": config.tile,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_PAD": padded(key_dim),
        "VALUE_PAD": padded(value_dim),
        "WINDOW": window or 0,
        "SOFTCAP": softcap or 0.0,
        "UPCAST": INTERPRETED,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


@triton.jit
def dot(left: tl.tensor, right: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """left [M, K] times right [K, N], summed in float32; float32 operands are not shortened."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def scaled_scores(products: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores times log2(e). SOFTCAP c makes a score s into c * tanh(s / c); 0 leaves it."""
    if SOFTCAP > 0:
        # Not libdevice's tanh, which the interpreter does not have. At either end this one is exactly -1 or 1.
        squared = tl.exp2(products * (scale * (2 * LOG2_E / SOFTCAP)))
        return (SOFTCAP * LOG2_E) * (1 - 2 / (squared + 1))
    return products * (scale * LOG2_E)


@triton.jit
def load_blocks(
    block_table: tl.tensor, tile: tl.tensor, lowest: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The block of each token of a tile, int64: a scalar where the tile lies in one block, else [TILE]."""
    if BLOCK % TILE == 0:
        return tl.load(block_table + tile * TILE // BLOCK, mask=tile * TILE < end, other=0).to(tl.int64)
    else:
        positions = tile * TILE + tl.arange(0, TILE)
        inside = (positions >= lowest) & (positions < end)
        return tl.load(block_table + positions // BLOCK, mask=inside, other=0).to(tl.int64)


@triton.jit
def load_rows(
    pages: tl.tensor,
    block: tl.tensor,
    tile: tl.tensor,
    inside: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """A tile of `pages`, from the `block` that `load_blocks` found: [TILE, PAD], zero past DIM.

    If MASKED it is zero where not `inside` [TILE] too.
    """
    cache, block_stride, token_stride = pages
    tokens = tl.arange(0, TILE).to(tl.int64)
    dims = tl.arange(0, PAD)
    if BLOCK % TILE == 0:
        rows = block * block_stride + tl.cast(tile * TILE % BLOCK, tl.int64) * token_stride + tokens * token_stride
    else:
        rows = block * block_stride + (tile * TILE + tokens) % BLOCK * token_stride
    addresses = cache + rows[:, None] + dims[None, :]
    if MASKED and PAD != DIM:
        return tl.load(addresses, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(addresses, mask=inside[:, None], other=0.0)
    elif PAD != DIM:
        return tl.load(addresses, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(addresses)


@triton.jit
def attend_tiles(
    query: tl.tensor,
    row_positions: tl.tensor,
    state: tl.tensor,
    tiles: tl.tensor,
    readable: tl.tensor,
    block_table: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """Takes the tiles [first, end) of one sequence and KV head into the softmax of each query row.

    `query` [ROWS, KEY_PAD] of tokens at `row_positions` [ROWS]. `state` is (maximum [ROWS], total [ROWS], weighted
    values [ROWS, VALUE_PAD]), float32, with the maximum in powers of two; so is what is returned. `keys` and `values`
    are (where the KV head begins in the cache, stride from block to block, from token to token). Only the positions
    of `readable`, [lowest, end), are read if MASKED; otherwise each row must see each token of the tiles.
    """
    maximum, total, weighted = state
    first_tile, end_tile = tiles
    lowest, end = readable
    KEY_PAD: tl.constexpr = query.shape[1]
    VALUE_PAD: tl.constexpr = weighted.shape[1]
    tokens = tl.arange(0, TILE)
    block = load_blocks(block_table, first_tile, lowest, end, BLOCK, TILE)
    for tile in range(first_tile, end_tile):
        positions = tile * TILE + tokens
        inside = (positions >= lowest) & (positions < end)
        key = load_rows(keys, block, tile, inside, BLOCK, TILE, KEY_DIM, KEY_PAD, MASKED)
        scores = scaled_scores(dot(query, tl.trans(key), UPCAST), scale, SOFTCAP)
        if MASKED:
            seen = inside[None, :] & (positions[None, :] <= row_positions[:, None])
            if WINDOW > 0:
                seen = seen & (positions[None, :] > row_positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that saw nothing yet: -inf minus -inf is NaN.
        anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - anchor[:, None])
        kept = tl.exp2(maximum - anchor)
        value = load_rows(values, block, tile, inside, BLOCK, TILE, VALUE_DIM, VALUE_PAD, MASKED)
        total = total * kept + tl.sum(weights, 1)
        weighted = weighted * kept[:, None] + dot(weights.to(value.dtype), value, UPCAST)
        maximum = new_maximum
        # One tile ahead: the pipeline would otherwise spend a stage on it, and have one less for keys and values.
        block = load_blocks(block_table, tile + 1, lowest, end, BLOCK, TILE)
    return maximum, total, weighted
