"""The scheduler under everything at once: random requests, pools, budgets, aborts, pauses, and an oracle's KV cache.

With a lookahead, steps are planned while the one before them is on its way, and run as late as they may.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.oracle import VOCAB_SIZE, OracleRunner, OracleStep, answer, facts

from inferq.engine.blocks import BlockPool
from inferq.engine.errors import InvalidRequestError
from inferq.engine.pipe import Ready
from inferq.engine.scheduler import Scheduler
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling, SequenceState

_LIMITS = st.builds(
    facts,
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(1, 12),
)
_TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)
_STOPS = st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2)


def _scheduler(limits: Ready) -> Scheduler:
    return Scheduler(
        BlockPool(limits.num_blocks, limits.block_size),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Keeps its own list of what is alive, and what each request has got."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Sequence] = {}
        self.everybody: list[Sequence] = []
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.in_flight: list[tuple[list[Scheduled], OracleStep]] = []
        self.keys = itertools.count()

    @initialize(limits=_LIMITS, lookahead=st.integers(0, 1))
    def start(self, limits: Ready, lookahead: int) -> None:
        self.limits = limits
        self.runner = OracleRunner(limits, lookahead=lookahead)
        self.scheduler = _scheduler(limits)
        self.pool = self.scheduler.pool

    @rule(prompt=_TOKENS, max_tokens=st.integers(1, 12), stop=_STOPS)
    def add(self, prompt: list[int], max_tokens: int, stop: frozenset[int]) -> None:
        key = next(self.keys)
        sampling = SequenceSampling(max_tokens=max_tokens, stop_token_ids=stop)
        sequence = Sequence(key, list(prompt), len(prompt), sampling)
        capacity = self.limits.num_blocks * self.limits.block_size
        try:
            self.scheduler.add(sequence)
        except InvalidRequestError:
            assert len(prompt) + max_tokens - 1 > capacity
        else:
            assert len(prompt) + max_tokens - 1 <= capacity
            self.alive[key], self.prompts[key], self.outputs[key] = sequence, prompt, []
            self.everybody.append(sequence)

    @rule(data=st.data(), what=st.sampled_from(["abort", "pause", "pause", "resume", "resume"]))
    def say(self, data: st.DataObject, what: str) -> None:
        key = data.draw(st.integers(0, max([*self.prompts, 0]) + 1))
        getattr(self.scheduler, what)(key)
        if what == "abort":
            self.alive.pop(key, None)

    @rule()
    def launch(self) -> None:
        """Plan and launch a step, and leave room for what comes before it is booked."""
        if len(self.in_flight) > self.runner.lookahead or not self.scheduler.has_work:
            return
        scheduled = self.scheduler.schedule()
        if not scheduled:
            assert self.in_flight, "there was work, nothing was on its way, and none was planned"
            return
        assert all(self.alive[each.sequence.key] is each.sequence for each in scheduled)
        assert all(each.sequence.state is SequenceState.RUNNING for each in scheduled)
        # The last token's KV entry is of no use to anybody.
        assert all(each.start + each.num_query_tokens < each.sequence.max_num_tokens for each in scheduled)
        self.in_flight.append((scheduled, self.runner.launch(scheduled)))

    @rule()
    def book(self) -> None:
        if not self.in_flight:
            return
        scheduled, step = self.in_flight.pop(0)
        for key, token_ids, finish_reason in self.scheduler.update(scheduled, step.tokens()):
            assert key not in self.ended
            self.outputs[key] += token_ids
            if finish_reason is not None:
                self.ended[key] = finish_reason.value
                self._check_answer(self.alive.pop(key))

    @rule(count=st.integers(1, 6), ahead=st.booleans())
    def steps(self, count: int, ahead: bool) -> None:
        for _ in range(count):
            self.launch()
            if ahead:
                self.launch()
            self.book()

    def _check_answer(self, sequence: Sequence) -> None:
        key, sampling = sequence.key, sequence.sampling
        expected = answer(self.prompts[key], sampling.max_tokens, tuple(sampling.stop_token_ids))
        assert (self.outputs[key], self.ended[key]) == expected

    @invariant()
    def blocks_are_conserved_and_nobody_shares_one(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = [block for sequence in self.everybody for block in sequence.block_table]
        assert len(held) == len(set(held)) == self.pool.num_used
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks

    @invariant()
    def a_step_on_its_way_keeps_its_blocks(self) -> None:
        for scheduled, step in self.in_flight:
            for each, part in zip(scheduled, step.parts, strict=True):
                assert each.sequence.block_table[: len(part.table)] == part.table
        if hasattr(self, "pool") and not self.in_flight:
            assert all(key in self.alive for key in (s.key for s in self.everybody if s.block_table))

    @invariant()
    def states_say_who_holds_blocks(self) -> None:
        if not hasattr(self, "pool"):
            return
        for sequence in self.alive.values():
            held = len(sequence.block_table) * self.limits.block_size
            assert held >= sequence.num_computed_tokens
            if sequence.state is not SequenceState.PAUSED:
                assert bool(held) == (sequence.state is SequenceState.RUNNING)
        holders = sum(1 for sequence in self.alive.values() if sequence.block_table)
        ending = sum(1 for sequence in self.everybody if sequence.state is SequenceState.ENDED and sequence.block_table)
        assert self.scheduler.num_running == holders + ending
        assert self.scheduler.num_waiting == len(self.alive) - holders

    def teardown(self) -> None:
        """All ends well: resumed, everybody gets its answer, and nothing is held."""
        if not hasattr(self, "pool"):
            return
        for key in self.prompts:
            self.scheduler.resume(key)
        # Each step adds at least one token's KV entry; recomputation takes a few times as many.
        bound = 50 + 20 * sum(sequence.max_num_tokens for sequence in self.alive.values())
        for _ in range(bound):
            self.launch()
            self.book()
        self.book()
        assert not self.alive
        assert not self.scheduler.has_work
        assert (self.pool.num_used, self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0, 0)


TestScheduler = SchedulerMachine.TestCase
# Preemption in its rarer forms needs many steps: examples are cheap here, some milliseconds each.
TestScheduler.settings = settings(max_examples=5 * settings.default.max_examples, stateful_step_count=60)
_REQUESTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=8)


@given(limits=_LIMITS, requests=_REQUESTS)
def test_without_pauses_requests_start_in_order_of_arrival(limits: Ready, requests: list[tuple[int, int]]) -> None:
    scheduler, runner = _scheduler(limits), OracleRunner(limits)
    accepted = []
    for key, (num_prompt_tokens, max_tokens) in enumerate(requests):
        sampling = SequenceSampling(max_tokens=max_tokens)
        try:
            scheduler.add(Sequence(key, [key] * num_prompt_tokens, num_prompt_tokens, sampling))
        except InvalidRequestError:
            continue
        accepted.append(key)
    while scheduler.has_work:
        scheduled = scheduler.schedule()
        scheduler.update(scheduled, runner.step(scheduled))
    first_steps = [next(i for i, step in enumerate(runner.steps) if key in dict(step)) for key in accepted]
    # Within a step decodes stand first, whoever came first: it runs as one.
    assert first_steps == sorted(first_steps)
