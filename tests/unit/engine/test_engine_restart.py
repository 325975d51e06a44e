"""The engine across the deaths of its child: every request goes on where it was, and only the guilty one ends."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.engines import (
    LONG,
    answer,
    child_of,
    read_all,
    running,
    scripted_engine,
    text_of,
    until_drained,
    up_to,
)
from support.fake_engine import ListSink
from support.waiting import wait_until

from inferq.engine import (
    AsyncInferenceEngine,
    EngineCrashedError,
    EngineDeadError,
    FinishReason,
    RestartPolicy,
)
from inferq.engine.loop import EngineLoop
from inferq.engine.pipe import Down, Log, Ping
from inferq.engine.stream import HIGH_WATER_TOKENS

#: No test here is about a hang unless it says so.
PATIENT = RestartPolicy(backoff_seconds=0, step_timeout_seconds=None)
WATCHFUL = replace(PATIENT, step_timeout_seconds=1.5)
Start = Callable[..., Awaitable[AsyncInferenceEngine]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
async def start(cache: Path) -> AsyncIterator[Start]:
    """Starts engines that restart. At the end each must be drained, and none may leave a process."""
    before = set(psutil.Process().children())
    engines: list[AsyncInferenceEngine] = []

    async def start_engine(*flags: str, restart: RestartPolicy = PATIENT, **config: Any) -> AsyncInferenceEngine:
        engine = scripted_engine(cache, *flags, restart=restart, **config)
        engines.append(engine)
        await engine.start_engine_loop()
        return engine

    yield start_engine
    for engine in engines:
        if engine.is_running:
            await until_drained(engine)
        await engine.stop()
        assert engine.idle
    assert set(psutil.Process().children()) <= before


def is_up(engine: AsyncInferenceEngine) -> bool:
    """There is a child, even if it works for one suspect alone."""
    return engine._tracker._placement._up


async def until_down(engine: AsyncInferenceEngine) -> None:
    """Kill the child, and wait for the news."""
    child_of(engine).kill()
    await wait_until(lambda: not is_up(engine), what="the child's death is known")
    assert engine.is_restarting


def submit(engine: AsyncInferenceEngine, prompt: str, num_tokens: int) -> ListSink:
    sink = ListSink()
    engine.submit(prompt, list(prompt.encode()), up_to(num_tokens), sink)
    return sink


def num_tokens(sinks: dict[str, ListSink]) -> int:
    return sum(len(sink.token_ids) for sink in sinks.values())


async def all_answered(sinks: dict[str, ListSink], num_tokens: int) -> None:
    await wait_until(lambda: all(sink.num_ends for sink in sinks.values()), what="every request has ended")
    for prompt, sink in sinks.items():
        assert (sink.text, sink.num_ends) == (answer(prompt, num_tokens), 1)
        sink.check_contiguous()


async def test_kill_9_of_the_child_changes_no_answer(start: Start) -> None:
    engine = await start("--step-ms", "2", max_num_seqs=4)
    stream = await engine.add_request("stream", "stream", sampling=up_to(120))
    head = await running(stream)
    sinks = {prompt: submit(engine, prompt, 120) for prompt in ("one", "two", "three", "four", "five", "six")}
    for kills in (1, 2):
        seen = num_tokens(sinks)
        await wait_until(lambda seen=seen: num_tokens(sinks) > seen)
        child_of(engine).kill()
        await wait_until(lambda kills=kills: engine.num_restarts == kills and is_up(engine))
    assert head.text + text_of(await read_all(stream)) == answer("stream", 120)
    await all_answered(sinks, 120)
    assert (await engine.complete("next", sampling=up_to(5))).text == answer("next", 5)


DEATHS = ["--exit-after", "--raise-after", "--garbage-after", "--hang-after"]


@pytest.mark.parametrize("how", DEATHS)
async def test_whatever_the_child_dies_of_the_requests_go_on(start: Start, tmp_path: Path, how: str) -> None:
    once = ("--once", str(tmp_path / "failed"))
    engine = await start("--step-ms", "2", how, "7", *once, restart=WATCHFUL)
    sinks = {prompt: submit(engine, prompt, 50) for prompt in ("one", "two", "three")}
    await all_answered(sinks, 50)
    assert engine.num_restarts == 1


async def test_a_child_that_hears_nothing_any_more_is_replaced(start: Start) -> None:
    engine = await start("--step-ms", "2", restart=WATCHFUL)
    sinks = {"one": submit(engine, "one", 300)}
    await wait_until(lambda: sinks["one"].deltas)
    child_of(engine).send_signal(signal.SIGSTOP)
    await all_answered(sinks, 300)
    assert engine.num_restarts == 1


@pytest.mark.parametrize("how", ["--exit-on-text", "--raise-on-text"])
@pytest.mark.parametrize("at_token", [0, 9, 40])
async def test_a_poison_ends_alone_and_all_others_as_if_it_had_never_been(
    start: Start, how: str, at_token: int
) -> None:
    engine = await start("--step-ms", "1", how, "poison", "--poison-at-token", str(at_token), max_num_seqs=3)
    sinks = {prompt: submit(engine, prompt, 80) for prompt in ("one", "two")}
    poison = submit(engine, "a poison", 80)
    sinks |= {prompt: submit(engine, prompt, 80) for prompt in ("three", "four", "five")}
    await all_answered(sinks, 80)
    await wait_until(lambda: poison.num_ends)
    assert [type(error) for error in poison.errors] == [EngineCrashedError]
    assert "for the second time while request 'a poison' ran alone" in str(poison.errors[0])
    assert answer("a poison", 80).startswith(poison.text)
    assert len(poison.token_ids) <= at_token
    assert engine.is_running
    assert engine.num_restarts == 3


@pytest.mark.slow
async def test_a_poison_that_hangs_is_found_too(start: Start) -> None:
    engine = await start("--step-ms", "1", "--hang-on-text", "poison", restart=WATCHFUL)
    sinks = {"one": submit(engine, "one", 50)}
    poison = submit(engine, "a poison", 50)
    await all_answered(sinks, 50)
    await wait_until(lambda: poison.num_ends)
    assert "a step took more than 1.5 s" in str(poison.errors[0])


async def test_several_poisons_are_found_one_after_the_other(start: Start) -> None:
    engine = await start("--exit-on-text", "poison")
    sinks = {f"prompt {i}": submit(engine, f"prompt {i}", 60) for i in range(3)}
    poisons = [submit(engine, f"poison {i}", 60) for i in range(3)]
    await all_answered(sinks, 60)
    await wait_until(lambda: all(poison.num_ends for poison in poisons))
    assert all(isinstance(poison.errors[0], EngineCrashedError) for poison in poisons)


# ---- while there is no child ----


async def test_what_is_asked_while_the_child_is_down(start: Start) -> None:
    """An abort ends at once, an add waits, a pause holds, a resume lets go."""
    engine = await start("--step-ms", "2", "--load-ms", "400")
    sinks = {prompt: submit(engine, prompt, 60) for prompt in ("kept", "paused")}
    aborted = await engine.add_request("aborted", "aborted", sampling=LONG)
    await running(aborted)
    await until_down(engine)

    freed = engine.freed("aborted")
    assert engine.abort("aborted")
    assert (await read_all(aborted))[-1].finish_reason is FinishReason.CANCELLED
    assert await freed is None
    assert engine.stats is None
    sinks["added"] = submit(engine, "added", 60)
    engine.pause("paused")
    assert not is_up(engine), "all that was before the next child"
    assert "running" in repr(engine)

    await wait_until(lambda: sinks["kept"].num_ends and sinks["added"].num_ends)
    assert not sinks["paused"].num_ends
    engine.resume("paused")
    await all_answered(sinks, 60)


async def test_a_reader_that_stopped_reading_gets_all_of_it_across_a_death(start: Start) -> None:
    engine = await start("--step-ms", "1")
    slow = await engine.add_request("slow", "slow", sampling=up_to(1000))
    await wait_until(lambda: len(slow._channel.unread) > HIGH_WATER_TOKENS)
    await until_down(engine)
    unread = len(slow._channel.unread)
    assert (await engine.complete("quick", sampling=up_to(100))).text == answer("quick", 100)
    assert len(slow._channel.unread) == unread, "it stays paused"
    assert text_of(await read_all(slow)) == answer("slow", 1000)


async def test_an_abort_on_its_way_to_a_child_that_dies_is_done(start: Start) -> None:
    engine = await start("--hang-on-text", "hang")
    sink = submit(engine, "hang", 50)
    freed = engine.freed("hang")
    child_of(engine).send_signal(signal.SIGSTOP)
    assert engine.abort("hang")
    assert sink.finish_reason is FinishReason.CANCELLED
    await until_down(engine)
    assert await freed is None
    assert (await engine.complete("next", sampling=up_to(5))).text == answer("next", 5)


# ---- giving up ----


async def test_an_engine_whose_every_step_kills_it_is_given_up(start: Start) -> None:
    engine = await start("--exit-after", "0", restart=replace(PATIENT, max_restarts=2))
    sinks = [submit(engine, f"prompt {i}", 50) for i in range(4)]
    assert "exited with code 70; starting it again, 2 times so far, does not help" in str(await engine.wait_dead())
    kinds = [type(error) for sink in sinks for error in sink.errors]
    assert kinds == [EngineCrashedError, EngineDeadError, EngineDeadError, EngineDeadError]
    assert not engine.is_running
    with pytest.raises(EngineDeadError, match="does not help"):
        await engine.add_request("later", "x")


async def test_a_start_that_fails_is_tried_again(start: Start) -> None:
    lines: list[Log] = []
    engine = await start("--step-ms", "1", restart=replace(PATIENT, backoff_seconds=0.05), log=lines.append)
    sinks = {"one": submit(engine, "one", 200)}
    await wait_until(lambda: sinks["one"].deltas)
    command = engine._supervisor._command
    engine._supervisor._command = ("/no/such/engine",)
    child_of(engine).kill()
    await wait_until(lambda: engine.num_restarts == 2)
    engine._supervisor._command = command
    await all_answered(sinks, 200)
    deaths = [line.details for line in lines if line.event == "engine_died"]
    assert "SIGKILL" in deaths[0]["reason"]
    assert "could not be started" in deaths[1]["reason"]
    assert [death["restart_in_seconds"] for death in deaths[:3]] == [0, 0.05, 0.1]


async def test_a_command_that_is_gone_for_good_is_given_up(start: Start) -> None:
    engine = await start(restart=replace(PATIENT, max_restarts=3))
    sink = submit(engine, "one", 20_000)
    await wait_until(lambda: sink.deltas)
    engine._supervisor._command = ("/no/such/engine",)
    child_of(engine).kill()
    with pytest.raises(EngineDeadError, match="could not be started"):
        raise await engine.wait_dead()
    assert [type(error) for error in sink.errors] == [EngineDeadError]
    assert engine.num_restarts == 4


async def test_a_child_with_another_model_is_not_taken(start: Start) -> None:
    engine = await start()
    engine._supervisor._command += ("--block-size", "8")
    child_of(engine).kill()
    assert "another model" in str(await engine.wait_dead())


async def test_the_next_child_gets_as_many_blocks_as_the_first(start: Start) -> None:
    engine = await start("--blocks", "77")
    engine._supervisor._command += ("--blocks", "55")
    child_of(engine).kill()
    await wait_until(lambda: engine.num_restarts == 1 and is_up(engine))
    assert engine.facts.num_blocks == 77


async def test_the_next_child_gets_the_attention_that_the_first_chose(start: Start) -> None:
    """Measured again, `auto` might come to another one, whose blocks are of another size."""
    engine = await start("--attention", "first")
    engine._supervisor._command += ("--attention", "second")
    child_of(engine).kill()
    await wait_until(lambda: engine.num_restarts == 1 and is_up(engine))
    assert engine.facts.attention == "first"


@pytest.mark.parametrize("when", ["in the backoff", "while it loads"])
async def test_a_stop_while_it_restarts_leaves_nothing(start: Start, when: str) -> None:
    backoff = 60 if when == "in the backoff" else 0
    policy = RestartPolicy(backoff_seconds=backoff, max_backoff_seconds=60, step_timeout_seconds=None)
    engine = await start(restart=policy)
    sink = ListSink()
    engine._supervisor._command += ("--load-ms", "600000")
    await until_down(engine)
    engine.submit("r", [1], LONG, sink)
    if when == "while it loads":
        await wait_until(lambda: engine.num_restarts and engine._supervisor._loop._process)
    await asyncio.gather(engine.stop(), engine.stop())
    assert [type(error) for error in sink.errors] == [EngineDeadError]
    assert "the engine was stopped" in str(sink.errors[0])


def test_an_event_loop_that_ends_takes_the_child_with_it(cache: Path) -> None:
    """`asyncio.run` cancels the engine's tasks: nothing is started again in that moment."""
    before = set(psutil.Process().children())

    async def forget_to_stop() -> None:
        engine = scripted_engine(cache, restart=PATIENT)
        await engine.start_engine_loop()
        await running(await engine.add_request("r", "x", sampling=LONG))

    asyncio.run(forget_to_stop())
    assert set(psutil.Process().children()) <= before


async def test_a_supervisor_that_is_cancelled_or_fails_is_a_death(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start()
    assert engine._supervisor._task is not None
    engine._supervisor._task.cancel()
    assert "supervisor was cancelled" in str(await engine.wait_dead())

    engine = await start()
    monkeypatch.setattr(engine._supervisor, "_report", lambda *_: 1 / 0)
    child_of(engine).kill()
    assert "supervisor failed: ZeroDivisionError" in str(await engine.wait_dead())
    assert "ZeroDivisionError" in caplog.text


# ---- what is no hang ----


class Pings:
    """Counts what the watchdog asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = 0
        send = EngineLoop.send

        def counting(loop: EngineLoop, message: Down) -> None:
            self.sent += isinstance(message, Ping)
            send(loop, message)

        monkeypatch.setattr(EngineLoop, "send", counting)


async def test_an_idle_child_and_one_with_paused_requests_alone_are_left_in_peace(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = Pings(monkeypatch)
    engine = await start("--step-ms", "1", restart=replace(PATIENT, step_timeout_seconds=0.6))
    await wait_until(lambda: pings.sent >= 12, what="two timeouts have passed")
    sinks = {"one": submit(engine, "one", 500)}
    await wait_until(lambda: sinks["one"].deltas)
    engine.pause("one")
    pings.sent = 0
    await wait_until(lambda: pings.sent >= 12, what="two timeouts have passed")
    engine.resume("one")
    await all_answered(sinks, 500)
    assert engine.num_restarts == 0


async def test_a_prefill_of_many_steps_that_say_nothing_is_no_hang(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = Pings(monkeypatch)
    engine = await start("--step-ms", "100", restart=replace(PATIENT, step_timeout_seconds=1), max_num_batched_tokens=8)
    prompt = "a long prompt " * 16
    sinks = {prompt: submit(engine, prompt, 2)}
    await all_answered(sinks, 2)
    assert pings.sent > 5, "it took longer than the timeout"
    assert engine.num_restarts == 0


async def test_another_load_that_never_ends_is_a_death_by_the_measure_of_the_first(start: Start) -> None:
    engine = await start(restart=replace(PATIENT, step_timeout_seconds=1, max_restarts=1))
    engine._supervisor._load_seconds = 0.05
    engine._supervisor._command += ("--load-ms", "600000")
    child_of(engine).kill()
    assert "loading the model took more than 1.5 s" in str(await engine.wait_dead())


async def test_the_first_load_is_not_timed(cache: Path) -> None:
    policy = replace(PATIENT, step_timeout_seconds=0.2)
    async with scripted_engine(cache, "--load-ms", "600", restart=policy) as engine:
        assert engine.num_restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
async def test_kills_at_random_moments_change_no_answer(start: Start, seed: int) -> None:
    dice = random.Random(seed)
    engine = await start("--step-ms", "1", "--tokens-per-step", "2", max_num_seqs=4)
    sinks = {f"prompt {i}": submit(engine, f"prompt {i}", 150) for i in range(10)}
    for _ in range(4):
        # So far apart that nobody is alone at two deaths without having generated enough in between.
        goal = num_tokens(sinks) + dice.randint(150, 250)
        await wait_until(lambda goal=goal: num_tokens(sinks) >= goal and is_up(engine))
        await until_down(engine)
    await all_answered(sinks, 150)
