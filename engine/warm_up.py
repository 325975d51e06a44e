"""Runs a step of each form that a service's steps can have, before it is ready.

A kernel is compiled when it is first launched with such arguments: their types, whether an address or a stride is a
multiple of 16, whether a number is 1. So these steps are run over the service's own arrays and cache, where each
argument is what it will be; of a form's sizes, only one token or row and several are told apart. What the steps leave
in the cache is nobody's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Final

from .assets import first_line
from .decode_graphs import decode_buckets
from .errors import ModelLoadError
from .model import Log
from .pipe import Ready
from .pool import memory_for
from .runner import ModelRunner
from .sequence import Scheduled, Sequence, SequenceSampling

_SAMPLING: Final = SequenceSampling(max_tokens=1)


def run_each_form(runner: ModelRunner, log: Log) -> None:
    """Raises ModelLoadError for a step that fails: it would fail while requests wait."""
    start = time.monotonic()
    steps = 0
    try:
        with memory_for("a step beside the KV cache: lower gpu_memory_utilization, num_blocks or kv_cache_bytes"):
            for scheduled in forms_of_steps(runner.facts):
                runner.launch(scheduled).tokens()
                steps += 1
    except ModelLoadError:
        raise
    except Exception as exc:
        raise ModelLoadError(f"a step cannot be computed: {type(exc).__name__}: {first_line(exc)}") from exc
    log("info", "steps tried", steps=steps, seconds=round(time.monotonic() - start, 1))


def forms_of_steps(facts: Ready) -> Iterator[list[Scheduled]]:
    """Decodes of each number of rows that they are padded to, prompts, a part of one, and decodes beside a prompt.

    No step is larger than the limits of `facts` allow.
    """
    most_rows = min(facts.max_num_seqs, facts.max_num_batched_tokens, facts.num_blocks)
    for rows in _decode_rows(most_rows):
        yield [_begin(row, 1, [row]) for row in range(rows)]
    if facts.max_model_len < 2:
        return
    blocks = list(range(-(-2 // facts.block_size)))
    if len(blocks) > facts.num_blocks:
        return
    yield [_begin(0, 2, blocks, computed=1)]
    if facts.max_num_batched_tokens >= 2:
        yield [_begin(0, 2, blocks)]
    after = len(blocks)
    if most_rows >= 2 and facts.max_num_batched_tokens >= 3 and after < facts.num_blocks:
        yield [_begin(1, 1, [after]), _begin(0, 2, blocks)]


def _decode_rows(most: int) -> Seq[int]:
    """Descending: the largest step takes the memory that the others find."""
    return sorted({*decode_buckets(most), most}, reverse=True)


def _begin(key: int, length: int, blocks: list[int], *, computed: int | None = None) -> Scheduled:
    """The first `computed` tokens, or all, of a sequence of `length` tokens."""
    return Scheduled(Sequence(key, [0] * length, length, _SAMPLING, block_table=blocks), computed or length)
