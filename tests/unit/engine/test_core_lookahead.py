"""The step loop with a step on its way while the next is planned: the same answers, and nothing said too early."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_loop import Loop, add
from support.oracle import EOS_TOKEN_ID, VOCAB_SIZE, answer, facts

from inferq.engine.pipe import Abort, Add, Down, Freed, Pause, Paused, PipeError, Resume, Step

Script = dict[int, list[Down | PipeError]]


def run(*messages: Down, script: Script | None = None, **limits: int) -> Loop:
    loop = Loop(facts(**limits), script or {}, lookahead=1)
    loop.run(*messages)
    return loop


def used_at_the_end(loop: Loop) -> int:
    return loop.core.scheduler.pool.num_used


def test_a_request_alone_is_computed_ahead_and_stops_at_its_last_token() -> None:
    loop = run(add(1, [1, 2, 3], 5))
    assert loop.tokens(1) == answer([1, 2, 3], 5)[0]
    assert loop.runner.steps == [[(1, 3)], *[[(1, 1)]] * 4]
    assert [step.stats.step for step in loop.all(Step)] == [1, 2, 3, 4, 5]
    assert used_at_the_end(loop) == 0


def test_a_step_is_launched_before_the_tokens_of_the_one_ahead_are_asked_for() -> None:
    order: list[str] = []
    loop = Loop(facts(), {}, lookahead=1)
    launch, compute = loop.runner.launch, loop.runner.compute
    loop.runner.launch = lambda scheduled: order.append("launch") or launch(scheduled)  # type: ignore[method-assign]
    loop.runner.compute = lambda parts: order.append("tokens") or compute(parts)  # type: ignore[method-assign]
    loop.run(add(1, [1, 2], 4))
    assert order == ["launch", "launch", "tokens", "launch", "tokens", "launch", "tokens", "tokens"]


def test_an_end_of_sequence_that_was_not_foreseen_costs_one_step_whose_token_nobody_gets() -> None:
    prompt = next([a, b] for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE) if _stops_early(a, b))
    expected, reason = answer(prompt, 30, (EOS_TOKEN_ID,))
    loop = run(Add(1, prompt, {"temperature": 0.0, "max_tokens": 30}), add(2, [5, 6], 30))
    assert (loop.tokens(1), reason) == (expected, "stop")
    assert sum(key == 1 for step in loop.runner.steps for key, _ in step) == len(expected) + 1
    assert loop.tokens(2) == answer([5, 6], 30)[0]
    assert used_at_the_end(loop) == 0


def _stops_early(*prompt: int) -> bool:
    output, reason = answer(prompt, 20, (EOS_TOKEN_ID,))
    return reason == "stop" and 2 < len(output) < 12


def test_an_abort_is_acknowledged_when_no_step_uses_its_blocks() -> None:
    loop = run(add(1, [1] * 9, 40), add(2, [2], 20), script={4: [Abort(1)]})
    at = next(number for number, message in enumerate(loop.sent) if isinstance(message, Freed))
    # It arrived while step 4 was launched and step 3 on its way: both are booked before it is answered.
    assert loop.sent[at].stats.step == 5
    assert loop.sent[at].stats.running == 1
    assert not any(key == 1 for step in loop.runner.steps[5:] for key, _ in step)
    assert not any(out[0] == 1 for step in loop.sent[at:] if isinstance(step, Step) for out in step.outputs)
    # What it got until then is a beginning of its answer.
    got = loop.tokens(1)
    assert got == answer([1] * 9, 40)[0][: len(got)]
    assert loop.tokens(2) == answer([2], 20)[0]


def test_a_request_that_has_ended_is_freed_when_the_step_on_its_way_is_booked() -> None:
    prompt = next([a, b] for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE) if _stops_early(a, b))
    loop = run(Add(1, prompt, {"temperature": 0.0, "max_tokens": 30}))
    (freed,) = loop.all(Freed)
    end = loop.all(Step)[-1]
    assert end.outputs[0][2] == "stop"
    assert (freed.stats.step, freed.stats.used_blocks) == (end.stats.step + 1, 0)
    assert end.stats.used_blocks > 0


def test_an_abort_of_the_only_request_is_answered() -> None:
    loop = run(add(1, [1, 2], 50), script={3: [Abort(1)]})
    (freed,) = loop.all(Freed)
    assert (freed.stats.running, freed.stats.used_blocks) == (0, 0)


def test_a_pause_is_acknowledged_behind_its_last_token() -> None:
    loop = run(add(1, [1, 2], 12), add(2, [3], 16), script={3: [Pause(1)], 9: [Resume(1)]})
    at = loop.sent.index(Paused(1))
    resumed = next(number for number, step in enumerate(loop.runner.steps) if number > 6 and (1, 1) in step)
    between = [
        out[0]
        for step in loop.sent[at:]
        if isinstance(step, Step) and step.stats.step <= resumed
        for out in step.outputs
    ]
    assert between and 1 not in between
    assert loop.tokens(1) == answer([1, 2], 12)[0]
    assert loop.tokens(2) == answer([3], 16)[0]


def test_nobody_is_preempted_while_a_step_is_on_its_way() -> None:
    """Two that grow to the whole pool: when it runs out, what is on its way is booked first."""
    loop = run(add(1, [1] * 8, 20), add(2, [2] * 8, 20), num_blocks=8, block_size=4)
    for key in (1, 2):
        assert loop.tokens(key) == answer([key] * 8, 20)[0]
    assert loop.core.scheduler.num_preemptions > 0
    assert used_at_the_end(loop) == 0


_PROMPTS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=10)
_REQUESTS = st.lists(st.tuples(_PROMPTS, st.integers(1, 12), st.booleans()), min_size=1, max_size=5)
_SAID = st.lists(st.tuples(st.integers(0, 25), st.sampled_from(["abort", "pause"]), st.integers(0, 4)), max_size=5)


@given(requests=_REQUESTS, said=_SAID, blocks=st.integers(6, 20), seqs=st.integers(1, 4), tokens=st.integers(2, 16))
def test_whatever_is_said_at_whatever_step_everybody_gets_its_own_answer(
    requests: list[tuple[list[int], int, bool]],
    said: list[tuple[int, str, int]],
    blocks: int,
    seqs: int,
    tokens: int,
) -> None:
    script: Script = {}
    for step, what, key in said:
        kind: Any = Abort if what == "abort" else Pause
        script.setdefault(step, []).append(kind(key))
        if what == "pause":
            script.setdefault(step + 4, []).append(Resume(key))
    limits = facts(num_blocks=blocks, block_size=4, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    loop = Loop(limits, script, lookahead=1)
    # A pause that comes last must not keep its request for ever.
    loop.inbox.when_idle = [Resume(key) for key in range(len(requests))] * 30
    loop.run(
        *[
            Add(key, prompt, {"temperature": 0.0, "max_tokens": count, "ignore_eos": ignore})
            for key, (prompt, count, ignore) in enumerate(requests)
        ]
    )
    freed = {message.key: message.stats for message in reversed(loop.all(Freed))}
    aborted = {key for _, what, key in said if what == "abort"}
    for key, (prompt, count, ignore) in enumerate(requests):
        expected, reason = answer(prompt, count, () if ignore else (EOS_TOKEN_ID,))
        got = loop.tokens(key)
        reasons = [out[2] for step in loop.all(Step) for out in step.outputs if out[0] == key and out[2]]
        if reasons:
            assert (got, reasons) == (expected, [reason])
        else:
            assert key in aborted and got == expected[: len(got)]
        steps = [number for number, step in enumerate(loop.runner.steps, 1) if key in dict(step)]
        assert freed[key].step >= max(steps, default=0), "the first word of it being freed"
    assert used_at_the_end(loop) == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_abort_frees_what_its_step_on_the_way_used_for_the_one_that_waits(lookahead: int) -> None:
    loop = Loop(facts(num_blocks=6, block_size=4), {2: [Abort(1)]}, lookahead=lookahead)
    loop.run(add(1, [1] * 20, 4), add(2, [2] * 20, 4))
    assert loop.tokens(2) == answer([2] * 20, 4)[0]
    assert used_at_the_end(loop) == 0
