"""Sequences that are paused, resumed or aborted, in whatever state they are."""

from __future__ import annotations

import pytest
from support.scheduling import Bench, bench

from inferq.engine.sequence import Sequence, SequenceState


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
