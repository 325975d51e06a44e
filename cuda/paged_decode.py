"""Paged attention of one new token a sequence: the context is cut into splits, and a second kernel joins their results.

Split-KV as in Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023). The query heads of one KV head are the rows of one
matrix, so that each key and value is read once. A split is made of whole tiles of its own sequence: with a given number
of splits, a sequence's result is the same to the bit whatever its neighbours are. Grids follow from shapes and limits
alone, and every length is read on the device, so that a CUDA graph can hold the launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton

from .paged_decode_kernels import _reduce_kernel, _split_kernel
from .paged_tiles import LaunchConfig, launch_options, padded, row_bytes, tile_of
from .strides import require_dense_rows

MAX_SPLITS: Final = 32
#: Above this many tokens of context there are at least MIN_LONG_SPLITS, however many rows there are.
LONG_CONTEXT: Final = 8192
MIN_LONG_SPLITS: Final = 4
#: Programs for each multiprocessor that the number of splits aims at.
PROGRAMS_EACH: Final = 4


def num_splits(rows: int, kv_heads: int, *, multiprocessors: int, max_context: int) -> int:
    """A power of two: into how many splits `paged_decode` cuts each context.

    It follows from a bucket's rows and the limit of the context, never from live lengths.
    """
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS_EACH * multiprocessors, rows * kv_heads))
    fewest = MIN_LONG_SPLITS if max_context > LONG_CONTEXT else 1
    return int(min(max(wanted, fewest), MAX_SPLITS))


def decode_config(*, key_dim: int, value_dim: int, dtype: torch.dtype, group: int, block: int) -> LaunchConfig:
    """How `_split_kernel` is launched for `group` query heads a KV head and blocks of `block` tokens."""
    size = row_bytes(key_dim, value_dim, dtype)
    # With more rows than these, what they sum does not fit into the registers of four warps; nor, without tensor cores,
    # as in float32, do their operands.
    rows = min(padded(group), 32 if size <= 256 and dtype.itemsize < 4 else 16)
    return LaunchConfig(rows=rows, tile=tile_of(size, block), warps=4, stages=3)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What the splits leave for the kernel that joins them. One is enough for all layers and all smaller buckets.

    `partial` float32 [rows, heads, splits, value_dim] are the outputs of the splits, `lse` float32 [rows, heads,
    splits] the logarithms, to base two, of their softmaxes' sums.
    """

    partial: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, heads: int, splits: int, value_dim: int, device: torch.device) -> DecodeWorkspace:
        shape = (rows, heads, splits)
        return cls(
            torch.empty(*shape, value_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def holds(self, rows: int, heads: int, splits: int, value_dim: int) -> bool:
        return all(
            has >= needs for has, needs in zip(self.partial.shape, (rows, heads, splits, value_dim), strict=True)
        )


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    splits: int,
    workspace: DecodeWorkspace | None,
) -> None:
    """Lets the last token of each sequence attend to its sequence's cache, which holds that token too.

    query [B, heads, key_dim]; key_cache [blocks, kv_heads, block, key_dim] and value_cache [blocks, kv_heads, block,
    value_dim], of query's dtype; block_tables int32 [B, width]; seq_lens int32 [B], in tokens, 0 for a row of padding;
    output [B, heads, value_dim], zeros in rows of padding. Any strides, with a contiguous last dimension. `window` W:
    the token sees itself and the W - 1 before it. `softcap` c: a score s becomes c * tanh(s / c). `sinks` [heads] are
    logits that take part in the softmax and carry no value. `splits` is a power of two, see `num_splits`; with one
    split there needs to be no workspace.

    Raises ValueError for a last dimension with gaps and for a workspace that is too small.
    """
    require_dense_rows(query=query, key_cache=key_cache, value_cache=value_cache, output=output)
    rows, heads, key_dim = query.shape
    kv_heads, block, value_dim = value_cache.shape[1:]
    group = heads // kv_heads
    if splits > 1 and (workspace is None or not workspace.holds(rows, heads, splits, value_dim)):
        raise ValueError(f"{rows} rows of {heads} heads in {splits} splits need a larger workspace")
    partial, lse = (None, None) if splits == 1 or workspace is None else (workspace.partial, workspace.lse)
    config = decode_config(key_dim=key_dim, value_dim=value_dim, dtype=query.dtype, group=group, block=block)
    _split_kernel[(rows, kv_heads * triton.cdiv(group, config.rows), splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        sinks,
        output,
        partial,
        lse,
        scale,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        *output.stride()[:2],
        *(partial.stride()[:3] if partial is not None else (0, 0, 0)),
        *(lse.stride()[:2] if lse is not None else (0, 0)),
        SPLITS=splits,
        **launch_options(config, key_cache, value_cache, group=group, window=window, softcap=softcap),
    )
    if partial is not None and lse is not None:
        _reduce_kernel[(rows, heads)](
            partial,
            lse,
            seq_lens,
            sinks,
            output,
            *partial.stride()[:3],
            *lse.stride()[:2],
            *output.stride()[:2],
            TILE=config.tile,
            VALUE_DIM=value_dim,
            VALUE_PAD=padded(value_dim),
            SPLITS=splits,
            WINDOW=window or 0,
            num_warps=4,
        )
