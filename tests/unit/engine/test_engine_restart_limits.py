"""When an engine that restarts gives up, and what it does not take for a hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import (
    Start,
    child_of,
    scripted_engine,
)
from support.restarting import PATIENT, all_answered, submit
from support.waiting import wait_until

from inferq.engine import (
    EngineCrashedError,
    EngineDeadError,
)
from inferq.engine.loop import EngineLoop
from inferq.engine.pipe import Down, Log, Ping


async def test_an_engine_whose_every_step_kills_it_is_given_up(start_restarting: Start) -> None:
    engine = await start_restarting("--exit-after", "0", restart=replace(PATIENT, max_restarts=2))
    sinks = [submit(engine, f"prompt {i}", 50) for i in range(4)]
    assert "exited with code 70; starting it again, 2 times so far, does not help" in str(await engine.wait_dead())
    kinds = [type(error) for sink in sinks for error in sink.errors]
    assert kinds == [EngineCrashedError, EngineDeadError, EngineDeadError, EngineDeadError]
    assert not engine.is_running
    with pytest.raises(EngineDeadError, match="does not help"):
        await engine.add_request("later", "x")


async def test_a_start_that_fails_is_tried_again(start_restarting: Start) -> None:
    lines: list[Log] = []
    engine = await start_restarting("--step-ms", "1", restart=replace(PATIENT, backoff_seconds=0.05), log=lines.append)
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


async def test_a_command_that_is_gone_for_good_is_given_up(start_restarting: Start) -> None:
    engine = await start_restarting(restart=replace(PATIENT, max_restarts=3))
    sink = submit(engine, "one", 20_000)
    await wait_until(lambda: sink.deltas)
    engine._supervisor._command = ("/no/such/engine",)
    child_of(engine).kill()
    with pytest.raises(EngineDeadError, match="could not be started"):
        raise await engine.wait_dead()
    assert [type(error) for error in sink.errors] == [EngineDeadError]
    assert engine.num_restarts == 4


async def test_a_child_with_another_model_is_not_taken(start_restarting: Start) -> None:
    engine = await start_restarting()
    engine._supervisor._command += ("--block-size", "8")
    child_of(engine).kill()
    assert "another model" in str(await engine.wait_dead())


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
    start_restarting: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = Pings(monkeypatch)
    engine = await start_restarting("--step-ms", "1", restart=replace(PATIENT, step_timeout_seconds=0.6))
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
    start_restarting: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = Pings(monkeypatch)
    engine = await start_restarting(
        "--step-ms", "100", restart=replace(PATIENT, step_timeout_seconds=1), max_num_batched_tokens=8
    )
    prompt = "a long prompt " * 16
    sinks = {prompt: submit(engine, prompt, 2)}
    await all_answered(sinks, 2)
    assert pings.sent > 5, "it took longer than the timeout"
    assert engine.num_restarts == 0


async def test_another_load_that_never_ends_is_a_death_by_the_measure_of_the_first(start_restarting: Start) -> None:
    engine = await start_restarting(restart=replace(PATIENT, step_timeout_seconds=1, max_restarts=1))
    engine._supervisor._load_seconds = 0.05
    engine._supervisor._command += ("--load-ms", "600000")
    child_of(engine).kill()
    assert "loading the model took more than 1.5 s" in str(await engine.wait_dead())


async def test_the_first_load_is_not_timed(cache: Path) -> None:
    policy = replace(PATIENT, step_timeout_seconds=0.2)
    async with scripted_engine(cache, "--load-ms", "600", restart=policy) as engine:
        assert engine.num_restarts == 0
