"""The rules of the scheduler, one a test: order, budget, preemption, pause, abort, endings."""

from __future__ import annotations

import itertools

import pytest
from support.oracle import OracleRunner, answer, facts

from inferq.engine.blocks import BlockPool
from inferq.engine.errors import InvalidRequestError
from inferq.engine.pipe import Ready
from inferq.engine.scheduler import Output, Scheduler
from inferq.engine.sequence import Sequence, SequenceSampling, SequenceState


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


def test_a_prompt_is_prefilled_in_chunks_and_sampled_after_the_last() -> None:
    b = bench(max_num_batched_tokens=4)
    sequence = b.add(10, 2)
    assert [b.step(), b.step()] == [[], []]
    assert len(b.step()) == 1
    b.drain()
    assert b.runner.steps == [[(0, 4)], [(0, 4)], [(0, 2)], [(0, 1)]]
    assert b.is_right(sequence)


def test_decodes_come_before_prefills_and_prefills_in_order_of_arrival() -> None:
    b = bench(max_num_batched_tokens=8)
    b.add(2, 20)
    b.step()
    b.add(10, 20)
    b.add(3, 20)
    b.step()
    b.step()
    assert b.runner.steps == [[(0, 2)], [(0, 1), (1, 7)], [(0, 1), (1, 3), (2, 3)]]


def test_more_sequences_than_fit_a_step_wait_and_start_in_order_of_arrival() -> None:
    b = bench(max_num_seqs=2)
    sequences = [b.add(3, 4) for _ in range(7)]
    b.drain()
    started = [key for key, _ in itertools.chain.from_iterable(b.runner.steps)]
    assert list(dict.fromkeys(started)) == list(range(7))
    assert all(b.is_right(sequence) for sequence in sequences)


def test_waiting_sequences_do_not_stall_when_all_running_ones_end_together() -> None:
    b = bench(max_num_seqs=2)
    for _ in range(6):
        b.add(3, 4)
    assert b.drain() == 3 * 4
    assert len(b.reasons) == 6


def test_a_budget_below_the_number_of_decodes_is_kept_and_everybody_ends() -> None:
    b = bench(max_num_batched_tokens=2)
    sequences = [b.add(3, 5) for _ in range(5)]
    b.drain()
    assert all(b.is_right(sequence) for sequence in sequences)


def test_nobody_overtakes_the_head_of_the_line_and_a_big_request_starts_in_bounded_time() -> None:
    b = bench(num_blocks=10, block_size=4)
    running = b.add(16, 12)
    b.step()
    big = b.add(24, 4)
    small = [b.add(2, 2) for _ in range(20)]
    for _ in range(running.sampling.max_tokens - 1):
        b.step()
        assert big.state is SequenceState.WAITING
        assert all(sequence.state is SequenceState.WAITING for sequence in small)
    b.step()
    assert b.runner.steps[-1][0] == (big.key, 24)
    b.drain()
    assert all(b.is_right(sequence) for sequence in (running, big, *small))
    assert b.scheduler.num_preemptions == 0


def test_a_newcomer_never_preempts() -> None:
    b = bench(num_blocks=4, block_size=4)
    b.add(13, 3)
    b.step()
    newcomer = b.add(4, 2)
    b.step()
    assert newcomer.state is SequenceState.WAITING
    b.drain()
    assert b.scheduler.num_preemptions == 0


def test_a_newcomer_does_not_take_the_block_that_a_running_sequence_is_about_to_need() -> None:
    """Else it would be preempted at the next step, with its prefill for nothing."""
    b = bench(num_blocks=3, block_size=4)
    b.add(3, 4)
    b.step()
    b.add(5, 2)
    b.drain()
    assert b.scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_blocks", [5, 7, 8, 9])
def test_a_tight_pool_changes_no_token_and_sends_none_twice(num_blocks: int) -> None:
    """Two requests of 34 prompt and 35 output tokens need 10 blocks of 16 tokens; from 8 on, one is preempted."""
    limits = {"block_size": 16, "max_num_batched_tokens": 128}
    tight, ample = bench(num_blocks=num_blocks, **limits), bench(num_blocks=64, **limits)
    for b in (tight, ample):
        sequences = [b.add(34, 35), b.add(34, 35)]
        b.drain()
        assert all(b.is_right(sequence) for sequence in sequences)
        assert [len(b.texts[sequence.key]) for sequence in sequences] == [35, 35]
    assert tight.texts == ample.texts
    assert (tight.scheduler.num_preemptions, ample.scheduler.num_preemptions) == (num_blocks >= 8, 0)


def test_two_preemptions_of_one_request_change_no_token() -> None:
    b = bench(num_blocks=8, block_size=4)
    sequences = [b.add(3, 26), b.add(3, 26)]
    others = [b.add(3, 9) for _ in range(3)]
    b.drain()
    assert b.scheduler.num_preemptions >= 2
    assert all(b.is_right(sequence) for sequence in (*sequences, *others))


def test_the_newest_is_preempted_and_comes_back_before_whoever_came_later() -> None:
    b = bench(num_blocks=12, block_size=2)
    oldest, middle, newest = b.add(3, 12), b.add(3, 12), b.add(2, 12)
    b.step()
    later = b.add(1, 1)
    while not b.scheduler.num_preemptions:
        b.step()
    assert oldest.state is SequenceState.RUNNING
    assert newest.state is SequenceState.WAITING
    assert middle.state is SequenceState.RUNNING
    after = len(b.runner.steps)
    b.drain()
    assert all(b.is_right(sequence) for sequence in (oldest, middle, newest, later))
    returns = [key for step in b.runner.steps[after:] for key, _ in step if key in (newest.key, later.key)]
    assert returns[0] == newest.key


def test_a_resumed_sequence_is_not_preempted_again_at_once() -> None:
    b = bench(num_blocks=8, block_size=4)
    sequences = [b.add(6, 20), b.add(6, 20)]
    b.drain()
    assert all(b.is_right(sequence) for sequence in sequences)
    assert b.scheduler.num_preemptions <= 2


@pytest.mark.parametrize(("prompt", "max_tokens"), [(200, 1), (100, 400), (128, 2)])
def test_what_can_never_fit_the_pool_is_refused_at_once_and_the_next_one_runs(prompt: int, max_tokens: int) -> None:
    b = bench(num_blocks=8, block_size=16, max_num_batched_tokens=256)
    with pytest.raises(InvalidRequestError, match=rf"{prompt} prompt tokens .* the whole pool has 8"):
        b.add(prompt, max_tokens)
    behind = b.add(5, 5)
    b.drain()
    assert b.is_right(behind)


def test_what_just_fits_the_pool_runs() -> None:
    b = bench(num_blocks=8, block_size=16, max_num_batched_tokens=256)
    # The last token's KV entry is never computed.
    sequence = b.add(100, 29)
    b.drain()
    assert b.is_right(sequence)


def test_a_paused_sequence_keeps_its_blocks_and_takes_no_part() -> None:
    b = bench()
    paused, other = b.add(6, 10), b.add(6, 10)
    b.step()
    b.scheduler.pause(paused.key)
    table = list(paused.block_table)
    b.drain()
    assert paused.block_table == table
    assert b.texts[paused.key] == b.texts[paused.key][:1]
    assert b.is_right(other)
    assert not b.scheduler.has_work
    b.scheduler.resume(paused.key)
    b.drain()
    assert b.is_right(paused)
    assert b.scheduler.num_preemptions == 0


def test_paused_ones_give_their_blocks_newest_first_where_a_running_one_cannot_go_on() -> None:
    b = bench(num_blocks=7, block_size=2)
    running, old, new = b.add(4, 8), b.add(2, 4), b.add(2, 4)
    b.step()
    assert b.pool.num_free == 3
    for sequence in (old, new):
        b.scheduler.pause(sequence.key)
    while not b.scheduler.num_preemptions:
        b.step()
    assert (bool(old.block_table), bool(new.block_table)) == (True, False)
    assert new.state is SequenceState.PAUSED
    b.drain()
    assert b.is_right(running)
    assert b.tokens_computed(running) == running.max_num_tokens - 1, "the running one was preempted instead"
    assert new.key not in b.reasons
    for sequence in (new, old):
        b.scheduler.resume(sequence.key)
    b.drain()
    assert b.is_right(old) and b.is_right(new)


def test_readers_who_stall_hold_neither_the_slots_nor_the_pool() -> None:
    b = bench(num_blocks=4, block_size=4, max_num_seqs=2)
    stalled = [b.add(5, 4), b.add(5, 4)]
    b.step()
    assert b.pool.num_free == 0
    for sequence in stalled:
        b.scheduler.pause(sequence.key)
    newcomer = b.add(6, 4)
    b.drain()
    assert b.is_right(newcomer)
    for sequence in stalled:
        b.scheduler.resume(sequence.key)
    b.drain()
    assert all(b.is_right(sequence) for sequence in stalled)


def test_a_newcomer_takes_nothing_from_paused_ones_while_others_run() -> None:
    b = bench(num_blocks=8, block_size=4)
    running, paused = b.add(5, 4), b.add(12, 4)
    b.step()
    b.scheduler.pause(paused.key)
    newcomer = b.add(13, 2)
    for _ in range(running.sampling.max_tokens - 1):
        assert newcomer.state is SequenceState.WAITING
        b.step()
    assert b.scheduler.num_preemptions == 0
    b.drain()
    assert b.is_right(newcomer)


def test_a_sequence_that_is_preempted_while_a_step_is_planned_is_in_no_part_of_the_plan() -> None:
    b = bench(num_blocks=10, block_size=2, max_num_batched_tokens=2)
    oldest = b.add(2, 18)
    b.step()
    newest = b.add(12, 4)
    while not b.scheduler.num_preemptions:
        in_prefill = newest.num_computed_tokens
        b.step()
    assert 0 < in_prefill < 11
    b.drain()
    assert b.is_right(oldest) and b.is_right(newest)


def test_the_oldest_of_several_that_decode_takes_the_block_of_the_newest() -> None:
    b = bench(num_blocks=8, block_size=4)
    sequences = [b.add(4, 12) for _ in range(3)]
    while not b.scheduler.num_preemptions:
        b.step()
    b.drain()
    assert all(b.is_right(sequence) for sequence in sequences)
    assert b.tokens_computed(sequences[0]) == sequences[0].max_num_tokens - 1


def test_resumed_sequences_over_max_num_seqs_take_turns_by_arrival() -> None:
    b = bench(max_num_seqs=2)
    first = [b.add(3, 6), b.add(3, 6)]
    b.step()
    for sequence in first:
        b.scheduler.pause(sequence.key)
    second = [b.add(3, 6), b.add(3, 6)]
    b.step()
    for sequence in first:
        b.scheduler.resume(sequence.key)
    b.step()
    assert [key for key, _ in b.runner.steps[-1]] == [sequence.key for sequence in first]
    b.drain()
    assert all(b.is_right(sequence) for sequence in (*first, *second))


def test_a_waiting_sequence_that_is_paused_lets_others_pass_and_gets_its_place_back() -> None:
    b = bench(max_num_seqs=1)
    b.add(2, 3)
    b.step()
    paused, other = b.add(2, 3), b.add(2, 3)
    b.scheduler.pause(paused.key)
    b.scheduler.resume(paused.key)
    b.drain()
    order = list(dict.fromkeys(key for step in b.runner.steps for key, _ in step))
    assert order == [0, paused.key, other.key]


def test_pause_resume_and_abort_of_what_is_not_there_do_nothing() -> None:
    b = bench()
    sequence = b.add(3, 3)
    b.drain()
    for key in (sequence.key, 99):
        b.scheduler.pause(key)
        b.scheduler.resume(key)
        assert b.scheduler.abort(key) is False
    running = b.add(3, 3)
    b.scheduler.resume(running.key)
    b.drain()
    assert b.is_right(running)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "paused", "preempted", "paused and preempted"])
def test_abort_frees_at_once_in_every_state(state: str) -> None:
    b = bench(num_blocks=7, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
    neighbour = b.add(6, 18)
    b.step()
    target = b.add(10, 7)
    _bring_into(b, target, state)
    held = len(target.block_table)
    used = b.pool.num_used
    assert b.scheduler.abort(target.key) is True
    assert b.pool.num_used == used - held
    assert b.scheduler.num_running + b.scheduler.num_waiting == 1
    b.drain()
    assert target.key not in b.reasons
    assert b.is_right(neighbour)
    assert b.pool.num_used == 0


def _bring_into(b: Bench, target: Sequence, state: str) -> None:
    if state == "waiting":
        return
    b.step()
    assert target.num_uncomputed_tokens > 1, "it should be in the middle of its prefill"
    if state == "prefilling":
        return
    if state in ("paused", "paused and preempted"):
        b.scheduler.pause(target.key)
    if state in ("preempted", "paused and preempted"):
        while not b.scheduler.num_preemptions:
            b.step()
        assert not target.block_table
    if state == "decoding":
        b.step()
        assert target.num_uncomputed_tokens == 1


def test_an_abort_between_plan_and_booking_hurts_nobody() -> None:
    b = bench()
    sequences = [b.add(3, 8) for _ in range(4)]
    b.step()
    scheduled = b.scheduler.schedule()
    sampled = b.runner.step(scheduled)
    b.scheduler.abort(sequences[1].key)
    b.scheduler.pause(sequences[2].key)
    outputs = b.scheduler.update(scheduled, sampled)
    assert [output.key for output in outputs] == [0, 2, 3]
    for output in outputs:
        b.texts[output.key] += output.token_ids
    b.scheduler.resume(sequences[2].key)
    b.drain()
    assert [b.is_right(sequences[place]) for place in (0, 2, 3)] == [True] * 3
    assert 1 not in b.reasons
    assert b.pool.num_used == 0


def test_aborting_those_that_wait_at_random_moments_leaks_nothing() -> None:
    b = bench(max_num_seqs=2, num_blocks=8)
    sequences = [b.add(4, 6) for _ in range(10)]
    for sequence in sequences[2:]:
        b.step()
        b.scheduler.abort(sequence.key)
    b.drain()
    assert (b.pool.num_used, b.scheduler.num_running, b.scheduler.num_waiting) == (0, 0, 0)
    assert all(b.is_right(sequence) for sequence in sequences[:2])


def _output_of(prompt_key: int, num_prompt_tokens: int, count: int) -> list[int]:
    return answer([(prompt_key + position) % 7 for position in range(num_prompt_tokens)], count)[0]


def test_an_end_token_on_the_last_allowed_place_is_a_stop() -> None:
    output = _output_of(0, 3, 8)
    last = next(place for place, token_id in enumerate(output) if place and token_id not in output[:place])
    b = bench()
    b.add(3, last + 1, stop=(output[last],))
    b.drain()
    assert (b.texts[0], b.reasons[0]) == (output[: last + 1], "stop")


def test_max_tokens_is_a_length_and_one_token_is_enough_for_it() -> None:
    b = bench()
    b.add(3, 1)
    b.add(3, 5)
    b.drain()
    assert b.reasons == {0: "length", 1: "length"}
    assert [len(b.texts[0]), len(b.texts[1])] == [1, 5]


def test_a_key_that_is_taken_and_a_step_with_the_wrong_number_of_tokens_are_our_bugs() -> None:
    b = bench()
    b.add(3, 3)
    with pytest.raises(ValueError, match="sequence 0 already"):
        b.scheduler.add(Sequence(0, [1], 1, SequenceSampling(max_tokens=1)))
    scheduled = b.scheduler.schedule()
    with pytest.raises(ValueError, match="shorter"):
        b.scheduler.update(scheduled, [])
