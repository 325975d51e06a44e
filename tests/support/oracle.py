"""A runner that checks what attention would read: a KV cache that holds token ids in the place of keys and values.

The token that it samples is a function of what it *read* through the block tables, so that a wrong block, a stale
entry or a skipped one shows in the output of a request, as it would with a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from inferq.engine.pipe import Ready
from inferq.engine.sequence import Scheduled

VOCAB_SIZE = 11
EOS_TOKEN_ID = 10


def facts(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 128,
) -> Ready:
    return Ready(
        model="oracle",
        text_dir="/nowhere",
        eos_token_ids=[EOS_TOKEN_ID],
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype="float32",
        device="cpu",
        attention="oracle",
    )


def next_token(token_ids: Sequence[int]) -> int:
    """The token after these, all of them being its inputs."""
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def answer(prompt: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int] = ()) -> tuple[list[int], str]:
    """What a request alone, in an endless pool, gets: its output and its finish reason."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in stop_token_ids:
            return token_ids[len(prompt) :], "stop"
    return token_ids[len(prompt) :], "length"


class OracleRunner:
    """Writes each step's tokens into its blocks, then reads each sequence back through its table."""

    def __init__(self, facts: Ready, *, before_step: Callable[[int], None] = lambda number: None) -> None:
        self.facts = facts
        self.steps: list[list[tuple[int, int]]] = []  #: for each step, (key, query tokens) of those in it
        self._before_step = before_step
        self._cache: list[list[int | None]] = [[None] * facts.block_size for _ in range(facts.num_blocks)]

    def step(self, scheduled: Sequence[Scheduled]) -> list[int]:
        self._before_step(len(self.steps))
        self.steps.append([(each.sequence.key, each.num_query_tokens) for each in scheduled])
        self._check_limits(scheduled)
        for each in scheduled:
            start = each.sequence.num_computed_tokens
            for position in range(start, start + each.num_query_tokens):
                self._write(each, position)
        return [next_token(self._read(each)) for each in scheduled if each.samples]

    def _check_limits(self, scheduled: Sequence[Scheduled]) -> None:
        assert 0 < len(scheduled) <= self.facts.max_num_seqs
        assert sum(each.num_query_tokens for each in scheduled) <= self.facts.max_num_batched_tokens
        assert all(0 < each.num_query_tokens <= each.sequence.num_uncomputed_tokens for each in scheduled)
        blocks = [block for each in scheduled for block in each.sequence.block_table]
        assert len(blocks) == len(set(blocks)), "a block is in two tables"

    def _write(self, each: Scheduled, position: int) -> None:
        block, offset = divmod(position, self.facts.block_size)
        self._cache[each.sequence.block_table[block]][offset] = each.sequence.token_ids[position]

    def _read(self, each: Scheduled) -> list[int]:
        size, sequence = self.facts.block_size, each.sequence
        read = [self._cache[sequence.block_table[p // size]][p % size] for p in range(len(sequence.token_ids))]
        assert read == sequence.token_ids, "attention would read other tokens than the sequence has"
        return sequence.token_ids
