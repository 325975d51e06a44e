"""The rules of the scheduler, one a test: order, budget, endings."""

from __future__ import annotations

import itertools

import pytest
from support.oracle import answer
from support.scheduling import bench

from inferq.engine.sequence import Sequence, SequenceSampling, SequenceState


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
