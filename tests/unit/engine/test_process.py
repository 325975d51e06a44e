"""The child as a process: its life, its pipe, what it says when it ends. Real sockets, real signals, no model."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.child import Child, scripted_child, start_child
from support.scripted import continuation

from inferq.engine.config import EngineConfig
from inferq.engine.pipe import MAX_FRAME_BYTES, Abort, Add, Fatal, Freed, Log, Pause, Ready, Resume, Step, Stop, encode

HELLO = list(b"hello")


def add(key: int, max_tokens: int, prompt: list[int] = HELLO) -> Add:
    return Add(key, prompt, {"max_tokens": max_tokens, "ignore_eos": True})


def until_finished(child: Child, *keys: int) -> None:
    child.until(lambda: all(child.finish_reason(key) for key in keys))


def last_words(child: Child) -> tuple[str, int]:
    """Fatal's message and the exit code."""
    end = child.read_to_the_end()[-1]
    assert isinstance(end, Fatal)
    return end.message, child.process.wait(10)


def test_ready_comes_first_and_names_the_limits_that_were_asked_for() -> None:
    with scripted_child(num_blocks=99, max_model_len=512, max_num_seqs=3, max_num_batched_tokens=77) as child:
        ready = child.ready
        assert not child.all(Step)
        limits = (ready.num_blocks, ready.max_model_len, ready.max_num_seqs, ready.max_num_batched_tokens)
        assert limits == (99, 512, 3, 77)
        assert [line.event for line in child.all(Log)] == ["scripted_engine_loaded"]


def test_what_was_sent_before_ready_is_served() -> None:
    with scripted_child("--load-ms", "50") as child:
        child.send(add(1, 5), add(2, 5), Abort(2))
        until_finished(child, 1)
        assert isinstance(next(message for message in child.seen if not isinstance(message, Log)), Ready)
        assert child.tokens(1) == continuation(HELLO, 5)
        assert child.tokens(2) == []


def test_stop_ends_it_in_good_order_while_requests_run() -> None:
    with scripted_child("--step-ms", "5") as child:
        child.send(add(1, 10_000))
        child.until(lambda: child.tokens(1))
        child.send(Stop())
        child.read_to_the_end()
        assert child.process.wait(10) == 0
        assert not child.all(Fatal)


def test_an_abort_while_a_step_runs_frees_its_blocks_before_any_further_step() -> None:
    with scripted_child("--step-ms", "20") as child:
        child.send(add(1, 10_000), add(2, 60, list(b"neighbour")))
        child.until(lambda: len(child.tokens(1)) >= 3)
        child.send(Abort(1))
        freed = child.until(lambda: child.freed(1))
        seen = len(child.tokens(1))
        assert (freed.stats.running, freed.stats.used_blocks) == (1, 1)
        until_finished(child, 2)
        assert len(child.tokens(1)) == seen
        assert child.tokens(2) == continuation(list(b"neighbour"), 60)
        assert child.all(Step)[-1].stats.used_blocks == 0


def test_a_hundred_requests_aborted_at_random_moments_leave_the_neighbour_and_the_pool_alone() -> None:
    moments = random.Random(20240501)
    with scripted_child("--step-ms", "1", max_num_seqs=8, num_blocks=64, max_num_batched_tokens=64) as child:
        child.send(add(0, 300))
        for key in range(1, 101):
            child.send(add(key, moments.randint(1, 40), [key] * moments.randint(1, 100)))
            steps = len(child.all(Step)) + moments.randint(0, 2)
            child.until(lambda steps=steps: len(child.all(Step)) >= steps)
            child.send(Abort(key))
        child.until(lambda: all(child.freed(key) for key in range(1, 101)))
        until_finished(child, 0)
        assert child.tokens(0) == continuation(HELLO, 300)
        for message in (*child.all(Step), *child.all(Freed)):
            assert message.stats.used_blocks + message.stats.free_blocks == 64
        last = child.all(Step)[-1].stats
        assert (last.running, last.waiting, last.used_blocks) == (0, 0, 0)


def test_adding_aborting_and_adding_again_in_one_breath_never_hits_the_second() -> None:
    with scripted_child() as child:
        for round_number in range(100):
            first, second = 2 * round_number, 2 * round_number + 1
            child.send(add(first, 50), Abort(first), add(second, 3))
        until_finished(child, *range(1, 200, 2))
        assert all(child.tokens(key) == continuation(HELLO, 3) for key in range(1, 200, 2))
        assert not any(child.finish_reason(key) for key in range(0, 200, 2))


def test_after_an_abort_in_mid_stream_the_next_request_still_completes() -> None:
    with scripted_child("--step-ms", "2", max_num_seqs=3) as child:
        child.send(*[add(key, 40, [key]) for key in range(3)])
        child.until(lambda: child.tokens(1))
        child.send(Abort(1), add(3, 5, [3]))
        until_finished(child, 0, 2, 3)
        assert [child.tokens(key) for key in (0, 2)] == [continuation([key], 40) for key in (0, 2)]
        assert child.tokens(3) == continuation([3], 5)


def test_pause_and_resume_through_the_pipe() -> None:
    with scripted_child("--step-ms", "1") as child:
        child.send(add(1, 30), add(2, 200, [9]))
        child.until(lambda: len(child.tokens(1)) >= 2)
        child.send(Pause(1), Abort(99))
        child.until(lambda: child.freed(99))
        held = len(child.tokens(1))
        until_finished(child, 2)
        assert len(child.tokens(1)) == held < 30
        child.send(Resume(1))
        until_finished(child, 1)
        assert child.tokens(1) == continuation(HELLO, 30)


def test_the_end_of_the_pipe_ends_it_even_in_a_step_that_hangs() -> None:
    with scripted_child("--hang-after", "2") as child:
        child.send(add(1, 10))
        child.until(lambda: len(child.tokens(1)) == 2)
        child.connection.close()
        assert child.process.wait(10) == 1


def test_the_end_of_the_pipe_ends_it_while_it_loads() -> None:
    with scripted_child("--load-ms", "600000") as child:
        child.connection.close()
        assert child.process.wait(10) == 1


def test_it_ignores_the_signals_that_are_meant_for_its_parent() -> None:
    with scripted_child("--step-ms", "2") as child:
        child.send(add(1, 50))
        child.until(lambda: child.tokens(1))
        for _ in range(3):
            child.process.send_signal(signal.SIGTERM)
            child.process.send_signal(signal.SIGINT)
        until_finished(child, 1)
        assert child.tokens(1) == continuation(HELLO, 50)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\xff" * 64, f"over {MAX_FRAME_BYTES}"),
        (b"\x00\x00\x00\x04oops", "not a message: b'oops'"),
        (b'\x00\x00\x00\x0b["nonsense"]'[:4] + b'["nonsens"]', "not a message"),
        (encode(Fatal("up, not down")), "Fatal"),
    ],
)
def test_garbage_from_the_parent_is_fatal_and_named(data: bytes, what: str) -> None:
    with scripted_child() as child:
        child.send(add(1, 3))
        until_finished(child, 1)
        child.connection.sendall(data)
        message, exit_code = last_words(child)
        assert what in message
        assert exit_code == 1


def test_an_error_in_a_step_is_fatal_with_its_message_and_the_traceback_goes_to_stderr() -> None:
    with scripted_child("--raise-after", "3") as child:
        child.send(add(1, 10))
        message, exit_code = last_words(child)
        assert message == "RuntimeError: the scripted engine was told to fail in this step"
        assert exit_code == 1
        assert len(child.tokens(1)) == 3
        assert child.process.stderr is not None
        assert b"Traceback" in child.process.stderr.read()


def test_a_load_that_fails_by_the_users_doing_is_one_line(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "nowhere"), device="cpu").to_json()
    with start_child([sys.executable, "-m", "inferq.engine.process"], config) as child:
        assert last_words(child) == (f"there is no folder {tmp_path}/nowhere", 1)
        assert child.process.stderr is not None
        assert b"Traceback" not in child.process.stderr.read()


def test_a_failing_load_is_fatal_with_its_message() -> None:
    with scripted_child("--fail-load", "no such model") as child:
        assert last_words(child) == ("RuntimeError: no such model", 1)
        assert not child.all(Ready)


@pytest.mark.parametrize(
    ("config", "what"),
    [("{", "JSON"), ('{"colour": 1}', "colour"), (json.dumps({"max_num_seqs": 0}), "max_num_seqs")],
)
def test_a_configuration_that_is_wrong_is_fatal_and_named(config: str, what: str) -> None:
    with start_child([sys.executable, "-m", "inferq.engine.process"], config) as child:
        message, exit_code = last_words(child)
        assert what in message
        assert exit_code == 1


def test_a_model_that_is_not_there_is_fatal_and_named() -> None:
    config = EngineConfig(model="/nowhere/at/all", threads=1)
    with start_child([sys.executable, "-m", "inferq.engine.process"], config) as child:
        message, exit_code = last_words(child)
        assert "/nowhere/at/all" in message
        assert exit_code == 1


def test_the_step_loop_does_not_wait_for_a_parent_that_does_not_read() -> None:
    """It gets through 4,000 steps, whose messages are more than the socket holds, while nobody reads."""
    with scripted_child("--exit-after", "4000", "--exit-code", "9") as child:
        child.send(add(1, 5000))
        assert child.process.wait(60) == 9


def test_the_child_s_policy_loads_no_torch() -> None:
    code = "import sys, inferq.engine.process; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
