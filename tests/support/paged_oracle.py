"""Paged attention in float64, one query and one head at a time, and caches in which all that must not be read is NaN.

It follows the definition and nothing else: no tiles, no running maximum, no powers of two. Knows no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: A block id of which no cache here has the block: what reads it reads outside of the cache.
NO_BLOCK = 1 << 30


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last n tokens of a sequence of L attend to it, causally: float64 [n, heads, value_dim].

    query [n, heads, key_dim], key [L, kv_heads, key_dim], value [L, kv_heads, value_dim].
    """
    (new, heads, _), length = query.shape, len(key)
    group = heads // key.shape[1]
    output = torch.empty(new, heads, value.shape[2], dtype=torch.float64)
    for row in range(new):
        end = length - new + row + 1
        begin = 0 if window is None else max(0, end - window)
        for head in range(heads):
            scores = key[begin:end, head // group].double() @ query[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            highest = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[head].double())
            weights = torch.exp(scores - highest)
            total = weights.sum()
            if sinks is not None:
                total = total + torch.exp(sinks[head].double() - highest)
            output[row, head] = (weights / total) @ value[begin:end, head // group].double()
    return output


@dataclass(frozen=True)
class Pages:
    """Sequences in a paged cache, with their blocks shuffled. Each slot that is no token of a sequence holds NaN.

    `keys` and `values` are each sequence's [length, kv_heads, dim]; `tables` int32 [sequences, width] has NO_BLOCK
    where a row goes on after its sequence.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_pages(
    lengths: Sequence[int],
    *,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    block: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    token_major: bool = False,
) -> Pages:
    """`token_major` lays a block out as [block, kv_heads, dim] in memory; the caches are views of it."""
    counts = [math.ceil(length / block) for length in lengths]
    num_blocks = sum(counts) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.full((len(lengths), max(counts) + 2), NO_BLOCK, dtype=torch.int32)
    caches, contents = [], []
    for dim in (key_dim, value_dim):
        shape = (num_blocks, block, kv_heads, dim) if token_major else (num_blocks, kv_heads, block, dim)
        cache = torch.full(shape, float("nan"), dtype=dtype)
        caches.append(cache.transpose(1, 2) if token_major else cache)
        contents.append([torch.randn(n, kv_heads, dim, generator=generator).to(dtype) for n in lengths])
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = shuffled[first : first + count]
        first += count
        for position in range(length):
            block_id = int(tables[row, position // block])
            for cache, content in zip(caches, contents, strict=True):
                cache[block_id, :, position % block] = content[row][position]
    return Pages(*caches, tables, torch.tensor(lengths, dtype=torch.int32), *contents)
