"""How much more the engine can take: free slots, and free blocks of its KV cache.

The child's own counters lag behind by a step. What was claimed since then, and has no token yet, is taken off by an
estimate. Knows the engine's facts and counters; knows nothing of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from inferq.engine.pipe import Ready, Stats


class Holds(Protocol):
    """The engine as far as it is asked; AsyncInferenceEngine has it."""

    @property
    def facts(self) -> Ready: ...

    @property
    def stats(self) -> Stats | None: ...

    @property
    def is_restarting(self) -> bool: ...


class EngineRoom:
    def __init__(self, engine: Holds) -> None:
        self._engine = engine
        self.slots = engine.facts.max_num_seqs
        self.block_size = engine.facts.block_size
        #: The most tokens that a request can come to: what the context, and the pool of blocks, have room for. The last
        #: token is never read, and so needs no place in a block.
        self.largest_request = min(engine.facts.max_model_len, engine.facts.num_blocks * self.block_size + 1)

    @property
    def is_open(self) -> bool:
        """False while the engine's process is started again: what waits in the queue may go to another worker."""
        return not self._engine.is_restarting

    def free_blocks(self, uncounted_tokens: Iterable[int]) -> int:
        """Blocks that are left when the requests that the child has not counted yet have theirs.

        None has more than the largest request: what seems to be over that is refused, or its estimate is wrong.
        """
        stats = self._engine.stats
        free = self._engine.facts.num_blocks if stats is None else stats.free_blocks
        return max(0, free - sum(map(self._blocks_of, uncounted_tokens)))

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.largest_request) // self.block_size)
