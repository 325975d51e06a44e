"""The step loop: what is in the inbox is applied before a step is planned, and a bad request hurts nobody else."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
from support.core_loop import GREEDY, Loop, add, run
from support.oracle import EOS_TOKEN_ID, VOCAB_SIZE, OracleRunner, answer, facts

from inferq.engine.core import EngineCore, sequence_from
from inferq.engine.errors import InvalidRequestError
from inferq.engine.pipe import (
    Abort,
    Add,
    Down,
    Freed,
    Pause,
    Paused,
    Ping,
    PipeError,
    Pong,
    Refused,
    Resume,
    Step,
    Stop,
    Up,
)


def test_a_request_gets_its_tokens_and_its_reason_one_step_message_a_step() -> None:
    loop = run(add(1, [1, 2, 3], 4))
    assert loop.tokens(1) == answer([1, 2, 3], 4)[0]
    *steps, freed = loop.sent
    assert [step.outputs[0][2] for step in steps] == [None, None, None, "length"]
    assert [step.stats.step for step in steps] == [1, 2, 3, 4]
    assert freed == Freed(1, steps[-1].stats)
    assert (freed.stats.running, freed.stats.used_blocks) == (0, 0)


def test_a_step_that_only_prefills_says_nothing() -> None:
    loop = run(add(1, [1] * 20, 1), max_num_batched_tokens=8)
    assert [step.stats.step for step in loop.all(Step)] == [3]


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_an_abort_that_is_in_the_inbox_is_applied_before_the_next_step_is_planned(at: int) -> None:
    """0, 1 and 2 are in the middle of the prefill, 5 is in the decode."""
    loop = run(add(1, [1] * 18, 30), add(2, [2, 3], 40), script={at: [Abort(1)]}, max_num_batched_tokens=8)
    assert any(key == 1 for key, _ in loop.runner.steps[at])
    assert all(key == 2 for step in loop.runner.steps[at + 1 :] for key, _ in step)
    freed, finished = loop.all(Freed)
    assert (freed.key, freed.stats.step, finished.key) == (1, at + 1, 2)
    # The neighbour has two blocks at most by then; the five of the aborted one are back.
    assert freed.stats.used_blocks <= 2 and freed.stats.running <= 1
    assert loop.used_blocks[at + 1] <= 2 < loop.used_blocks[at]
    assert loop.tokens(2) == answer([2, 3], 40)[0]


def test_an_abort_right_behind_its_request_means_that_nothing_runs() -> None:
    loop = run(add(1, [1, 2], 5), Abort(1), add(2, [1, 2], 2))
    assert all(key == 2 for step in loop.runner.steps for key, _ in step)
    assert loop.sent[0] == Freed(1, loop.sent[0].stats)
    assert loop.sent[0].stats.used_blocks == 0


def test_an_abort_of_what_is_unknown_or_finished_is_answered_and_does_no_harm() -> None:
    loop = run(Abort(77), add(1, [1, 2], 2), add(2, [3, 4], 9), script={4: [Abort(1)]})
    assert [freed.key for freed in loop.all(Freed)] == [77, 1, 1, 2]
    assert loop.tokens(2) == answer([3, 4], 9)[0]


def test_an_abort_that_arrives_while_the_last_token_is_computed_does_no_harm() -> None:
    loop = run(add(1, [1, 2], 3), add(2, [3, 4], 9), script={2: [Abort(1)]})
    assert loop.tokens(1) == answer([1, 2], 3)[0]
    assert loop.tokens(2) == answer([3, 4], 9)[0]
    assert loop.all(Freed)[0].stats.running == 1


def test_aborting_queued_requests_at_odd_moments_gives_everything_back() -> None:
    script = {number: [Abort(number + 2)] for number in range(8)}
    loop = run(*[add(key, [key % 10, 1], 12) for key in range(10)], script=script, max_num_seqs=2)
    assert sorted(freed.key for freed in loop.all(Freed)) == list(range(10))
    for key in range(2):
        assert loop.tokens(key) == answer([key, 1], 12)[0]
    last = loop.sent[-1].stats
    assert (last.running, last.waiting, last.used_blocks, last.free_blocks) == (0, 0, 0, 64)


def test_pause_holds_a_request_and_resume_lets_it_go_on() -> None:
    script: dict[int, list[Down | PipeError]] = {2: [Pause(1)], 8: [Resume(1)]}
    loop = run(add(1, [1, 2], 10), add(2, [3], 12), script=script)
    in_steps = [any(key == 1 for key, _ in step) for step in loop.runner.steps]
    assert in_steps == [True] * 3 + [False] * 6 + [True] * 7
    assert loop.tokens(1) == answer([1, 2], 10)[0]


def test_the_loop_waits_where_only_paused_requests_are_left_and_goes_on_when_one_is_resumed() -> None:
    loop = Loop(facts(), {1: [Pause(1)]})
    loop.inbox.when_idle = [Abort(99), Resume(1)]
    loop.run(add(1, [1, 2], 10))
    assert [(freed.key, freed.stats.step) for freed in loop.all(Freed)] == [(99, 2), (1, 10)]
    assert loop.tokens(1) == answer([1, 2], 10)[0]


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty prompt": ([], {}, "the prompt is empty"),
    "negative id": ([1, -1], {}, "token id -1 is not in the vocabulary of 11"),
    "id past the vocabulary": ([VOCAB_SIZE], {}, "token id 11 is not in the vocabulary of 11"),
    "huge id": ([2**63], {}, "not in the vocabulary"),
    "id that is a float": ([1.0], {}, "list of integers"),
    "id that is true": ([True], {}, "list of integers"),
    "id that is a string": (["1"], {}, "list of integers"),
    "prompt that is a string": ("1", {}, "list of integers"),
    "prompt that is null": (None, {}, "list of integers"),
    "unknown field": ([1], {"n": 2}, "'n'"),
    "max_tokens 0": ([1], {"max_tokens": 0}, "max_tokens must be at least 1"),
    "max_tokens with a fraction": ([1], {"max_tokens": 1.5}, "max_tokens must be an integer"),
    "max_tokens as text": ([1], {"max_tokens": "5"}, "max_tokens must be an integer"),
    "temperature nan": ([1], {"temperature": float("nan")}, "temperature"),
    "temperature negative": ([1], {"temperature": -1}, "temperature"),
    "temperature of four hundred digits": ([1], {"temperature": 10**400}, "temperature must be a finite number"),
    "temperature as text": ([1], {"temperature": "hot"}, "temperature must be a finite number"),
    "top_k with a fraction": ([1], {"top_k": 2.5}, "top_k must be an integer"),
    "top_p 0": ([1], {"top_p": 0}, "top_p"),
    "seed that is a list": ([1], {"seed": [1]}, "seed must be an integer"),
    "seed with a fraction": ([1], {"seed": 0.5}, "seed must be an integer"),
    "stop_token_ids that is a number": ([1], {"stop_token_ids": 5}, "stop_token_ids must be a sequence"),
    "stop_token_ids of lists": ([1], {"stop_token_ids": [[1]]}, "stop_token_ids must be integers"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_alone(name: str) -> None:
    prompt, sampling, message = BAD[name]
    bad = Add(2, prompt, {**GREEDY, **sampling})
    loop = run(add(1, [1, 2, 3], 6), bad, add(3, [4], 3))
    (refused,) = loop.all(Refused)
    assert (refused.key, refused.invalid) == (2, True)
    assert message in refused.message
    assert loop.tokens(1) == answer([1, 2, 3], 6)[0]
    assert loop.tokens(3) == answer([4], 3)[0]
    assert loop.sent[-1].stats.used_blocks == 0


def test_sampling_that_is_no_object_is_refused() -> None:
    loop = run(add(1, [1], 2), Add(2, [1], None))  # type: ignore[arg-type]
    assert [refused.key for refused in loop.all(Refused)] == [2]


def test_a_prompt_up_to_the_context_gets_what_room_there_is() -> None:
    """With a context of 64: 63 tokens leave room for one, 64 and 65 for none."""
    loop = run(*[add(length, [1] * length) for length in (63, 64, 65)], max_model_len=64)
    assert [(step.outputs[0][0], step.outputs[0][2]) for step in loop.all(Step)] == [(63, "length")]
    messages = {refused.key: refused.message for refused in loop.all(Refused)}
    assert set(messages) == {64, 65}
    for length, message in messages.items():
        assert f"{length} tokens" in message and "max_model_len 64" in message and "63 at most" in message


def test_generation_that_reaches_the_context_ends_with_length() -> None:
    loop = run(add(1, [1] * 60, 500), add(2, [2] * 60), max_model_len=64)
    for key, prompt in ((1, [1] * 60), (2, [2] * 60)):
        assert (loop.tokens(key), "length") == answer(prompt, 4)
    assert loop.all(Step)[-1].outputs[-1][2] == "length"


def test_a_request_that_can_never_fit_the_pool_is_refused_and_the_one_behind_it_runs() -> None:
    never = [add(1, [1] * 200, 1), add(2, [1] * 100, 400), add(4, [1] * 200)]
    loop = run(*never, add(3, [5], 4), num_blocks=8, max_model_len=512)
    messages = {refused.key: refused.message for refused in loop.all(Refused)}
    assert set(messages) == {1, 2, 4}
    assert all("the whole pool has 8" in message for message in messages.values())
    assert loop.tokens(3) == answer([5], 4)[0]


def test_without_max_tokens_the_pool_is_a_bound_like_the_context() -> None:
    loop = run(add(1, [1] * 10), num_blocks=8, block_size=4, max_model_len=128)
    # 32 tokens have a KV entry, and the last token needs none.
    assert len(loop.tokens(1)) == 8 * 4 + 1 - 10


def test_end_of_sequence_ends_a_request_unless_it_is_ignored() -> None:
    prompt = next([a, b] for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE) if EOS_TOKEN_ID in _early(a, b))
    expected, reason = answer(prompt, 20, (EOS_TOKEN_ID,))
    assert reason == "stop"
    loop = run(add(1, prompt, 20, ignore_eos=False), add(2, prompt, 20))
    assert (loop.tokens(1), loop.tokens(2)) == (expected, answer(prompt, 20)[0])


def _early(*prompt: int) -> list[int]:
    return answer(prompt, 10)[0][2:]


def test_sampling_reaches_the_sequence_and_a_top_k_that_excludes_nothing_is_off() -> None:
    sampling = {"max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 7, "stop_token_ids": [2, 3]}
    made = sequence_from(Add(1, [1], sampling), facts()).sampling
    assert (made.max_tokens, made.temperature, made.top_k, made.top_p, made.seed) == (3, 0.5, 4, 0.9, 7)
    assert made.stop_token_ids == {2, 3, EOS_TOKEN_ID}
    assert sequence_from(Add(1, [1], {**sampling, "top_k": 10**30}), facts()).sampling.top_k == 0


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_generated_tokens_are_prefilled_with_the_prompt_and_counted(cut: int) -> None:
    whole = answer([1, 2, 3], 12)[0]
    loop = run(Add(1, [1, 2, 3], {**GREEDY, "max_tokens": 12}, whole[:cut]), max_num_batched_tokens=4)
    assert loop.tokens(1) == whole[cut:]
    assert sum(count for step in loop.runner.steps for _, count in step) == 3 + 12 - 1
    assert loop.all(Step)[-1].outputs[0][2] == "length"


@pytest.mark.parametrize(
    ("generated", "says"),
    [
        ([VOCAB_SIZE], "not in the vocabulary"),
        ([1.0], "generated_token_ids must be a list of integers"),
        ("12", "generated_token_ids must be a list"),
        ([1, 2, 3], "3 tokens were generated already, of 3 at most"),
    ],
)
def test_generated_tokens_that_cannot_be_gone_on_from_are_refused(generated: Any, says: str) -> None:
    loop = run(Add(1, [1], {**GREEDY, "max_tokens": 3}, generated), add(2, [1, 2], 2))
    (refused,) = loop.all(Refused)
    assert (refused.key, refused.invalid) == (1, True)
    assert says in refused.message
    assert loop.tokens(2) == answer([1, 2], 2)[0]


def test_a_ping_is_answered_between_two_steps_and_where_nothing_runs() -> None:
    loop = run(Ping(), add(1, [1, 2], 4), script={1: [Ping()]})
    assert [type(message) for message in loop.sent] == [Pong, Step, Step, Pong, Step, Step, Freed]
    loop = Loop(facts(), {1: [Pause(1)]})
    loop.inbox.when_idle = [Ping(), Resume(1)]
    loop.run(add(1, [1, 2], 3))
    assert len(loop.all(Pong)) == 1


def test_a_pause_is_answered_when_no_step_has_the_request_in_it() -> None:
    loop = run(add(1, [1, 2], 10), add(2, [3], 6), Pause(77), script={2: [Pause(1)]})
    assert [paused.key for paused in loop.all(Paused)] == [77, 1]
    later = loop.sent[loop.sent.index(Paused(1)) :]
    assert not any(out[0] == 1 for step in later if isinstance(step, Step) for out in step.outputs)


def test_refusals_are_invalid_requests() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        sequence_from(Add(1, [], {}), facts())


def test_an_error_in_a_step_ends_the_loop_with_it() -> None:
    def explode(number: int) -> None:
        if number == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    inbox: SimpleQueue[Down | PipeError] = SimpleQueue()
    inbox.put(add(1, [1, 2], 9))
    sent: list[Up] = []
    core = EngineCore(OracleRunner(facts(), before_step=explode), inbox, sent.append)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        core.run()
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("message", "what"), [(PipeError("not a message: b'x'"), "not a message: b'x'"), (Refused(1, "", True), "Refused")]
)
def test_what_is_no_message_to_a_child_ends_the_loop(message: Any, what: str) -> None:
    loop = Loop(facts(), {})
    with pytest.raises(PipeError, match=what):
        loop.run(message)


def test_stop_ends_the_loop_whatever_still_runs() -> None:
    loop = run(add(1, [1, 2], 9), add(2, [1, 2], 9), script={3: [Stop()]})
    assert len(loop.runner.steps) == 4
