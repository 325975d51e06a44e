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
    """Writes each step's tokens into its blocks, then reads each sequence back through its table.

    With a `lookahead` a step runs as late as it may: when its tokens are asked for, behind all that was launched since.
    """

    def __init__(
        self, facts: Ready, *, before_step: Callable[[int], None] = lambda number: None, lookahead: int = 0
    ) -> None:
        self.facts = facts
        self.lookahead = lookahead
        self.steps: list[list[tuple[int, int]]] = []  #: for each step, (key, query tokens) of those in it
        self._before_step = before_step
        self._cache: list[list[int | None]] = [[None] * facts.block_size for _ in range(facts.num_blocks)]
        self._last: dict[int, list[int]] = {}  #: of the step that ran last, by key: tokens up to the sampled one

    def launch(self, scheduled: Sequence[Scheduled]) -> OracleStep:
        self._before_step(len(self.steps))
        self.steps.append([(each.sequence.key, each.num_query_tokens) for each in scheduled])
        self._check_limits(scheduled)
        return OracleStep(self, scheduled)

    def step(self, scheduled: Sequence[Scheduled]) -> list[int]:
        return self.launch(scheduled).tokens()

    def compute(self, parts: Sequence[OraclePart]) -> list[int]:
        known = self._last
        self._last = {}
        for part in parts:
            if part.is_pending:
                part.token_ids.append(known[part.key][len(part.token_ids)])
        for part in parts:
            for position in range(part.start, part.end):
                block, offset = divmod(position, self.facts.block_size)
                self._cache[part.table[block]][offset] = part.token_ids[position]
        sampled = []
        for part in parts:
            if part.samples:
                sampled.append(next_token(self._read(part)))
                self._last[part.key] = [*part.token_ids, sampled[-1]]
        return sampled

    def _check_limits(self, scheduled: Sequence[Scheduled]) -> None:
        assert 0 < len(scheduled) <= self.facts.max_num_seqs
        assert sum(each.num_query_tokens for each in scheduled) <= self.facts.max_num_batched_tokens
        for each in scheduled:
            known = len(each.sequence.token_ids)
            assert 0 < each.num_query_tokens and each.start + each.num_query_tokens <= known + self.lookahead
        blocks = [block for each in scheduled for block in each.sequence.block_table]
        assert len(blocks) == len(set(blocks)), "a block is in two tables"

    def _read(self, part: OraclePart) -> list[int]:
        size = self.facts.block_size
        read = [self._cache[part.table[p // size]][p % size] for p in range(len(part.token_ids))]
        assert read == part.token_ids, "attention would read other tokens than the sequence has"
        return part.token_ids


class OraclePart:
    """One sequence's part in a step as it was when the step was launched."""

    def __init__(self, each: Scheduled) -> None:
        self.key, self.start, self.samples = each.sequence.key, each.start, each.samples
        self.end = each.start + each.num_query_tokens
        self.token_ids = list(each.sequence.token_ids)
        self.table = list(each.sequence.block_table)
        self.is_pending = self.end > len(self.token_ids)


class OracleStep:
    """A launched step of the oracle."""

    def __init__(self, runner: OracleRunner, scheduled: Sequence[Scheduled]) -> None:
        self._runner = runner
        self.parts = [OraclePart(each) for each in scheduled]

    def tokens(self) -> list[int]:
        return self._runner.compute(self.parts)
