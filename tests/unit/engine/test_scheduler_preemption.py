"""A pool that is too small for all at once: who gives its blocks back, who waits, and that no token changes."""

from __future__ import annotations

import pytest
from support.scheduling import bench

from inferq.engine.errors import InvalidRequestError
from inferq.engine.sequence import SequenceState


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
