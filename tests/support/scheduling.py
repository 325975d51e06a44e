"""A scheduler at work: over the oracle's cache, with what came out of it."""

from __future__ import annotations

import itertools

from inferq.engine.blocks import BlockPool
from inferq.engine.pipe import Ready
from inferq.engine.scheduler import Output, Scheduler
from inferq.engine.sequence import Sequence, SequenceSampling
from support.oracle import OracleRunner, answer, facts


class Bench:
    """A scheduler over the oracle's cache, and what came out of it."""

    def __init__(self, limits: Ready) -> None:
        self.runner = OracleRunner(limits)
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
        )
        self.texts: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self._keys = itertools.count()

    def add(self, num_prompt_tokens: int, max_tokens: int, *, stop: tuple[int, ...] = ()) -> Sequence:
        key = next(self._keys)
        prompt = [(key + position) % 7 for position in range(num_prompt_tokens)]
        sampling = SequenceSampling(max_tokens=max_tokens, stop_token_ids=frozenset(stop))
        sequence = Sequence(key, list(prompt), num_prompt_tokens, sampling)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Output]:
        scheduled = self.scheduler.schedule()
        outputs = self.scheduler.update(scheduled, self.runner.step(scheduled))
        for output in outputs:
            assert output.key not in self.reasons, "something came after the end"
            self.texts.setdefault(output.key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.key] = output.finish_reason.value
        return outputs

    def drain(self, limit: int = 2000) -> int:
        """Step until nothing can run; the number of steps."""
        for number in range(limit):
            if not self.scheduler.has_work:
                return number
            self.step()
        raise AssertionError(f"not drained after {limit} steps")

    def tokens_computed(self, sequence: Sequence) -> int:
        """In all steps together: more than it has if it was preempted."""
        return sum(count for step in self.runner.steps for key, count in step if key == sequence.key)

    def is_right(self, sequence: Sequence) -> bool:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        sampling = sequence.sampling
        expected = answer(prompt, sampling.max_tokens, tuple(sampling.stop_token_ids))
        return (self.texts[sequence.key], self.reasons[sequence.key]) == expected


def bench(**limits: int) -> Bench:
    return Bench(facts(**limits))
