"""Part 1: paged decode and prefill against float64, over head sizes, groups, windows, soft-caps, sinks and splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch

from inferq.cuda.paged_decode import DecodeWorkspace, paged_decode
from inferq.cuda.paged_prefill import paged_prefill

from . import oracle
from .checks import Case, Draw, PagedCache, starts_of

#: Around the edges of blocks and tiles; 0 is a padded row.
CONTEXTS: Final = (0, 1, 31, 32, 33, 63, 64, 65, 127, 200, 1000, 2049)
#: (query tokens, all tokens): fresh prompts, later chunks, single tokens, and a sequence that is not there.
CHUNKS: Final = ((1, 1), (5, 5), (33, 40), (0, 0), (64, 200), (130, 130), (1, 513), (257, 700))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer's attention is like."""

    dim: int
    group: int  #: query heads a KV head
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int = 1  #: of decode
    value_dim: int | None = None  #: where it is not `dim`
    kv_heads: int = 2
    block: int = 32

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def __str__(self) -> str:
        facts = [f"dim {self.dim}", f"group {self.group}", f"block {self.block}"]
        facts += [f"value dim {self.value_dim}"] if self.value_dim else []
        facts += [f"window {self.window}"] if self.window else []
        facts += [f"softcap {self.softcap:g}"] if self.softcap else []
        facts += ["sinks"] if self.sinks else []
        return ", ".join(facts)


#: Each value of each of them at least once, and the pairs that meet in one branch of a kernel.
SHAPES: Final = (
    Shape(128, 4),
    Shape(128, 4, splits=4),
    Shape(128, 4, splits=32),
    Shape(64, 1, splits=2),
    Shape(64, 3, window=100, splits=4),
    Shape(64, 8, window=100, sinks=True, splits=8),
    Shape(80, 1, block=64, splits=4),
    Shape(96, 3, softcap=30.0, splits=2),
    Shape(128, 8, softcap=50.0, window=100, block=64, splits=16),
    Shape(256, 4, softcap=50.0, window=64, splits=4),
    Shape(256, 1, splits=1, block=256),
    Shape(192, 4, value_dim=128, splits=4),
)


def attention_cases(
    shapes: tuple[Shape, ...] = SHAPES,
    *,
    contexts: tuple[int, ...] = CONTEXTS,
    chunks: tuple[tuple[int, int], ...] = CHUNKS,
) -> list[Case]:
    # Prefill has no splits: shapes that differ by them alone would be the same case again.
    once = {str(shape): shape for shape in shapes}
    return [
        *(
            Case("paged_decode", f"{shape}, {shape.splits} splits", partial(check_decode, shape, contexts))
            for shape in shapes
        ),
        *(Case("paged_prefill", name, partial(check_prefill, shape, chunks)) for name, shape in once.items()),
    ]


def check_decode(shape: Shape, contexts: tuple[int, ...], draw: Draw) -> float:
    value_dim, heads = shape.value_dim or shape.dim, shape.heads
    cache = cache_of(shape, draw, contexts)
    # As the model gives it: a part of each row of the fused projections.
    query = draw.poisoned(len(contexts), heads + 1, shape.dim)[:, :heads]
    query.copy_(draw.normal(*query.shape))
    query[[row for row, context in enumerate(contexts) if context == 0]] = float("nan")
    output = draw.poisoned(len(contexts), heads, value_dim)
    options = options_of(shape, draw)
    paged_decode(
        query,
        cache.key,
        cache.value,
        cache.tables,
        draw.lengths(contexts),
        output,
        splits=shape.splits,
        workspace=DecodeWorkspace.allocate(len(contexts), heads, shape.splits, value_dim, draw.device),
        **options,
    )
    return decode_error(output, query, cache, options)


def check_prefill(shape: Shape, chunks: tuple[tuple[int, int], ...], draw: Draw) -> float:
    cache = cache_of(shape, draw, [context for _, context in chunks])
    starts = starts_of(chunks)
    query = draw.normal(starts[-1] + 3, shape.heads, shape.dim)
    query[starts[-1] :] = float("nan")
    output = draw.poisoned(len(query), shape.heads, shape.value_dim or shape.dim)
    options = options_of(shape, draw)
    paged_prefill(
        query,
        cache.key,
        cache.value,
        cache.tables,
        draw.lengths(starts),
        draw.lengths([context for _, context in chunks]),
        output,
        max_query_len=max(tokens for tokens, _ in chunks),
        **options,
    )
    if not bool(output[starts[-1] :].isnan().all()):  # rows of nobody stay as they were
        return float("inf")
    return prefill_error(output, query, cache, starts, options)


def decode_error(output: torch.Tensor, query: torch.Tensor, cache: PagedCache, options: Mapping[str, Any]) -> float:
    """Of output [sequences, heads, value_dim] for one query token of each sequence; zeros for an empty one."""
    expected = torch.zeros(output.shape, dtype=torch.float64, device=output.device)
    for row, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if len(keys):
            expected[row] = oracle.attention(query[row : row + 1], keys, values, **options)[0]
    return oracle.row_error(output, expected)


def prefill_error(
    output: torch.Tensor, query: torch.Tensor, cache: PagedCache, starts: Sequence[int], options: Mapping[str, Any]
) -> float:
    """Of output [tokens, heads, value_dim], where the query tokens of the sequences begin and end at `starts`."""
    error = 0.0
    for row, (begin, end) in enumerate(pairwise(starts)):
        if begin < end:
            expected = oracle.attention(query[begin:end], cache.keys[row], cache.values[row], **options)
            error = max(error, oracle.row_error(output[begin:end], expected))
    return error


def cache_of(shape: Shape, draw: Draw, contexts: Sequence[int]) -> PagedCache:
    return PagedCache(
        draw,
        contexts,
        kv_heads=shape.kv_heads,
        key_dim=shape.dim,
        value_dim=shape.value_dim or shape.dim,
        block=shape.block,
    )


def options_of(shape: Shape, draw: Draw) -> dict[str, Any]:
    sinks = draw.normal(shape.heads) if shape.sinks else None
    return {"scale": shape.dim**-0.5, "window": shape.window, "softcap": shape.softcap, "sinks": sinks}
