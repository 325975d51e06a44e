"""Part 1, where flash-attn is installed: its paged decode and prefill by our binding, against float64 as our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from inferq.cuda.flash import (
    PAGE_TOKENS,
    Flash,
    FlashParams,
    FlashUnsupportedError,
    Prompts,
    check_heads,
    check_layer,
)

from .attention_checks import CHUNKS, CONTEXTS, SHAPES, Shape, cache_of, decode_error, options_of, prefill_error
from .checks import Case, Draw, starts_of


def flash_cases(
    flash: Flash,
    shapes: Sequence[Shape] = SHAPES,
    *,
    contexts: tuple[int, ...] = CONTEXTS,
    chunks: tuple[tuple[int, int], ...] = CHUNKS,
) -> list[Case]:
    """Those of the shapes that flash-attn serves, in blocks of its own size."""
    paged = {str(each): each for each in (replace(shape, block=PAGE_TOKENS, splits=1) for shape in shapes)}
    served = {name: shape for name, shape in paged.items() if _serves(shape)}
    present = tuple(chunk for chunk in chunks if chunk[0])
    return [
        *(Case("flash decode", name, partial(check_decode, flash, shape, contexts)) for name, shape in served.items()),
        *(Case("flash prefill", name, partial(check_prefill, flash, shape, present)) for name, shape in served.items()),
    ]


def check_decode(flash: Flash, shape: Shape, contexts: tuple[int, ...], draw: Draw) -> float:
    cache = cache_of(shape, draw, contexts)
    query = draw.normal(len(contexts), shape.heads, shape.dim)
    params = _params(shape)
    output = flash.decode(query, cache.key, cache.value, cache.tables, draw.lengths(contexts), params)
    return decode_error(output, query, cache, options_of(shape, draw))


def check_prefill(flash: Flash, shape: Shape, chunks: tuple[tuple[int, int], ...], draw: Draw) -> float:
    cache = cache_of(shape, draw, [context for _, context in chunks])
    if flash.reads_past_end:
        cache.value.nan_to_num_(0.0)  # as the engine clears the blocks that a prompt begins
    starts = starts_of(chunks)
    query = draw.normal(starts[-1], shape.heads, shape.dim)
    prompts = Prompts(
        block_tables=cache.tables,
        query_starts=draw.lengths(starts),
        seq_lens=draw.lengths([context for _, context in chunks]),
        max_query_len=max(tokens for tokens, _ in chunks),
        max_seq_len=max(context for _, context in chunks),
    )
    output = flash.prefill(query, cache.key, cache.value, prompts, _params(shape))
    return prefill_error(output, query, cache, starts, options_of(shape, draw))


def _params(shape: Shape) -> FlashParams:
    return FlashParams(shape.dim**-0.5, shape.window, shape.softcap)


def _serves(shape: Shape) -> bool:
    try:
        check_heads(num_heads=shape.heads, num_kv_heads=shape.kv_heads, sinks=shape.sinks)
        check_layer(
            dtype=torch.bfloat16,
            block_size=shape.block,
            key_dim=shape.dim,
            value_dim=shape.value_dim or shape.dim,
        )
    except FlashUnsupportedError:
        return False
    return True
