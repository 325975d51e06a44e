"""Which sequences take part in the next step, with how many tokens, and in which blocks: continuous batching.

The order rule is first come, first served. In a step, sequences that decode come first, then prefills in chunks, in
order of arrival, under one budget of tokens. The head of the waiting line waits for its blocks and nobody overtakes
it. When the pool runs out, the newest running sequence gives its blocks back and is computed again later; what it has
generated stays.

Steps may be planned before the one ahead of them is booked: what a step on its way samples counts as a token that is
there, whose id nobody here needs. Blocks that such a step uses are given back when it is booked, whatever ends the
sequence meanwhile. Plain Python: it knows neither tensors, nor text, nor the pipe.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from .blocks import BlockPool
from .errors import InvalidRequestError
from .request import FinishReason
from .sequence import Scheduled, Sequence, SequenceState

_ARRIVAL = attrgetter("arrival")


class Output(NamedTuple):
    """What a step added to one sequence."""

    key: int
    token_ids: list[int]
    finish_reason: FinishReason | None


class Scheduler:
    """All sequences of the engine, and the pool that they share.

    Running, waiting and paused ones stand in a list each, in order of arrival. Paused sequences take no place of
    `max_num_seqs`, so that readers who stall cannot stop the others.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._paused: list[Sequence] = []
        self._ended: list[Sequence] = []
        self._steps_in_flight = 0
        self._arrivals = count()

    @property
    def has_work(self) -> bool:
        """True if a step has something to compute, or will have when those on their way are booked.

        With none on its way `schedule` then never answers an empty plan.
        """
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks, the paused and the ended ones among them."""
        return self._num_alive_running + len(self._ended)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - self._num_alive_running

    @property
    def _num_alive_running(self) -> int:
        return len(self._running) + sum(1 for sequence in self._paused if sequence.block_table)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the line.

        Raises InvalidRequestError if the pool could never hold it, ValueError if its key is taken.
        """
        if sequence.key in self._sequences:
            raise ValueError(f"there is a sequence {sequence.key} already")
        needed = sequence.blocks_to_finish(self.pool.block_size)
        if needed > self.pool.num_blocks:
            raise InvalidRequestError(
                f"{sequence.num_prompt_tokens} prompt tokens and up to {sequence.sampling.max_tokens} new ones need "
                f"{needed} KV cache blocks of {self.pool.block_size} tokens; the whole pool has {self.pool.num_blocks}"
            )
        sequence.arrival = next(self._arrivals)
        self._sequences[sequence.key] = sequence
        self._enter_line(sequence, SequenceState.WAITING)

    def abort(self, key: int) -> bool:
        """Forget a sequence, in whatever state. False if there is none of that key.

        Its blocks are free now, or when the last step that uses them is booked.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        self._forget(sequence)
        return True

    def pause(self, key: int) -> None:
        """Leave a sequence out of steps. It keeps its blocks as long as the others do not need them."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._leave_line(sequence)
            self._enter_line(sequence, SequenceState.PAUSED)

    def resume(self, key: int) -> None:
        """Let a paused sequence go on, at the place that its arrival gives it."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._leave_line(sequence)
            self._enter_line(sequence, SequenceState.RUNNING if sequence.block_table else SequenceState.WAITING)

    def schedule(self) -> list[Scheduled] | None:
        """Plan one step and give its sequences the blocks that it writes into; it counts as launched.

        None where a sequence would have to give up its blocks while steps are on their way: book those first.
        """
        plan = _Plan(self._max_num_batched_tokens)
        try:
            self._fill(plan)
        except _StepsInFlight:
            return None
        # A newcomer of one token decodes like those that run; which kernel computes it must not depend on the others.
        plan.scheduled.sort(key=lambda each: not each.decodes)
        if plan.scheduled:
            self._steps_in_flight += 1
        for each in plan.scheduled:
            each.sequence.num_steps_in_flight += 1
            each.sequence.num_computed_tokens += each.num_query_tokens
            each.sequence.num_pending_tokens += each.samples
        return plan.scheduled

    def _fill(self, plan: _Plan) -> None:
        taking_part = [each for each in self._running[: self._max_num_seqs] if not each.awaits_its_last_token]
        decodes = [sequence for sequence in taking_part if sequence.num_uncomputed_tokens == 1]
        prefills = [sequence for sequence in taking_part if sequence.num_uncomputed_tokens > 1]
        for sequence in (*decodes, *prefills):
            # One that stood further back may have been preempted meanwhile.
            if plan.budget and sequence.state is SequenceState.RUNNING and self._grow(sequence):
                plan.add(sequence)
        while plan.budget and (admitted := self._admit_head()) is not None:
            plan.add(admitted)

    def update(self, scheduled: Seq[Scheduled], sampled: Seq[int]) -> list[Output]:
        """Book a step that has run: `sampled` has one token for each that `samples`, in order.

        Steps are booked in the order in which they were scheduled. A sequence that has ended since is left out.
        """
        self._steps_in_flight -= 1
        sampling = [each.sequence for each in scheduled if each.samples]
        for each in scheduled:
            each.sequence.num_steps_in_flight -= 1
            each.sequence.num_pending_tokens -= each.samples
            if each.sequence.state is SequenceState.ENDED and not each.sequence.num_steps_in_flight:
                self._ended.remove(each.sequence)
                self._release_blocks(each.sequence)
        return [
            self._append(sequence, token_id)
            for sequence, token_id in zip(sampling, sampled, strict=True)
            if sequence.state is not SequenceState.ENDED
        ]

    def _append(self, sequence: Sequence, token_id: int) -> Output:
        sequence.token_ids.append(token_id)
        finish_reason = None
        if token_id in sequence.sampling.stop_token_ids:
            finish_reason = FinishReason.STOP
        elif sequence.reached_max_tokens:
            finish_reason = FinishReason.LENGTH
        if finish_reason is not None:
            self._forget(sequence)
        return Output(sequence.key, [token_id], finish_reason)

    def _grow(self, sequence: Sequence) -> bool:
        """Give a running sequence the block of its next token. False if it was preempted, being the newest.

        A prefill needs none: it got its blocks when it was admitted.
        """
        needed = sequence.blocks_needed(1, self.pool.block_size)
        while (blocks := self.pool.allocate(needed)) is None:
            victim = self._newest_paused() or self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += blocks
        return True

    def _admit_head(self) -> Sequence | None:
        """Move the head of the waiting line into the running ones, with blocks for all tokens that it has.

        One more block must be free for each that will still grow: a newcomer that took the last one would be preempted
        at the next step, its prefill wasted. It takes blocks from paused sequences only where nothing else could run.
        """
        if not self._waiting or len(self._running) >= self._max_num_seqs:
            return None
        head, size = self._waiting[0], self.pool.block_size
        needed = head.blocks_needed(head.num_uncomputed_tokens, size)
        growing = sum(1 for each in self._running if each.blocks_to_finish(size))
        growing += head.blocks_to_finish(size) > needed
        while not self._running and self.pool.num_free < needed + growing and (paused := self._newest_paused()):
            self._preempt(paused)
        if self.pool.num_free < needed + growing or (blocks := self.pool.allocate(needed)) is None:
            return None
        self._leave_line(head)
        head.block_table += blocks
        self._enter_line(head, SequenceState.RUNNING)
        return head

    def _newest_paused(self) -> Sequence | None:
        """The newest paused sequence that holds blocks."""
        return next((sequence for sequence in reversed(self._paused) if sequence.block_table), None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks. It is computed again from its first token; a paused one stays paused.

        Raises _StepsInFlight: they may use these blocks, and what they end may make it unnecessary.
        """
        if self._steps_in_flight:
            raise _StepsInFlight
        self.num_preemptions += 1
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        if sequence.state is SequenceState.RUNNING:
            self._leave_line(sequence)
            self._enter_line(sequence, SequenceState.WAITING)

    def _line(self, state: SequenceState) -> list[Sequence]:
        match state:
            case SequenceState.WAITING:
                return self._waiting
            case SequenceState.RUNNING:
                return self._running
            case SequenceState.PAUSED:
                return self._paused
            case SequenceState.ENDED:
                return self._ended

    def _enter_line(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.state = state
        insort(self._line(state), sequence, key=_ARRIVAL)

    def _leave_line(self, sequence: Sequence) -> None:
        self._line(sequence.state).remove(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self._leave_line(sequence)
        if sequence.num_steps_in_flight:
            self._enter_line(sequence, SequenceState.ENDED)
        else:
            sequence.state = SequenceState.ENDED
            self._release_blocks(sequence)

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        sequence.block_table.clear()


class _StepsInFlight(Exception):
    """A sequence's blocks are wanted, and steps that may use them have not been booked."""


class _Plan:
    """A step as it is put together."""

    def __init__(self, budget: int) -> None:
        self.scheduled: list[Scheduled] = []
        self.budget = budget  #: tokens that may still be computed in this step

    def add(self, sequence: Sequence) -> None:
        num_query_tokens = min(sequence.num_uncomputed_tokens, self.budget)
        self.scheduled.append(Scheduled(sequence, num_query_tokens))
        self.budget -= num_query_tokens
