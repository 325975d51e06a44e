"""How an engine starts, dies and stops: every consumer hears of it, no child is left, nothing starts again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.engines import LONG, child_of, read_all, running, scripted_engine, up_to
from support.fake_engine import ListSink
from support.processes import all_gone
from support.waiting import wait_until

import inferq.engine.loop
from inferq.engine import AsyncInferenceEngine, EngineConfig, EngineDeadError, EngineError
from inferq.engine.pipe import Stats, Step

Make = Callable[..., AsyncInferenceEngine]
Started = Callable[[], set[psutil.Process]]


@pytest.fixture
def started() -> Started:
    """The processes that this test has started and that still exist."""
    before = set(psutil.Process().children())
    return lambda: set(psutil.Process().children()) - before


@pytest.fixture
async def make(cache: Path, started: Started) -> AsyncIterator[Make]:
    """Makes engines. At the end each is stopped, and none may have left a process or a request."""
    engines: list[AsyncInferenceEngine] = []

    def make_engine(*flags: str, **config: Any) -> AsyncInferenceEngine:
        engines.append(scripted_engine(cache, *flags, **config))
        return engines[-1]

    yield make_engine
    for engine in engines:
        await engine.stop()
        assert engine.idle
    assert started() == set()


DEATHS = [
    (["--exit-after", "5"], "the engine's process exited with code 70"),
    (["--raise-after", "5"], "the engine's process failed: RuntimeError: the scripted engine was told to fail"),
    (["--garbage-after", "5"], "the engine's process sent what is no message: a frame of 4294967295 bytes"),
]


@pytest.mark.parametrize(("flags", "says"), DEATHS)
async def test_a_death_reaches_every_consumer(make: Make, flags: list[str], says: str) -> None:
    engine = make("--step-ms", "2", *flags)
    await engine.start_engine_loop()
    child = child_of(engine)
    stream = await engine.add_request("stream", "a", sampling=LONG)
    sink = ListSink()
    engine.submit("sink", [1, 2], LONG, sink)
    complete = asyncio.create_task(engine.complete("b", sampling=LONG))
    watcher = asyncio.create_task(engine.wait_dead())
    with pytest.raises(EngineDeadError, match=says):
        await read_all(stream)
    with pytest.raises(EngineDeadError, match=says):
        await complete
    assert says in str(await watcher)
    assert [type(error) for error in sink.errors] == [EngineDeadError]
    assert not engine.is_running
    with pytest.raises(EngineDeadError, match=says):
        await engine.add_request("later", "c")
    with pytest.raises(EngineDeadError, match=says):
        engine.submit("later", [1], LONG, ListSink())
    assert engine.abort("stream") is False
    await all_gone([child])


async def test_a_killed_child_is_named_as_such(make: Make) -> None:
    engine = make()
    await engine.start_engine_loop()
    child_of(engine).kill()
    assert "was killed by SIGKILL" in str(await engine.wait_dead())


async def test_a_child_that_hangs_is_gone_after_stop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inferq.engine.loop, "_STOP_SECONDS", 0.2)
    engine = make("--hang-after", "3")
    await engine.start_engine_loop()
    child = child_of(engine)
    stream = await engine.add_request("r", "a", sampling=LONG)
    await running(stream)
    child.send_signal(signal.SIGSTOP)  # it hears nothing any more, not even its pipe
    await engine.stop()
    assert not psutil.pid_exists(child.pid)
    with pytest.raises(EngineDeadError, match="the engine was stopped"):
        await read_all(stream)


async def test_a_child_that_closes_its_pipe_and_stays_is_ended(
    cache: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    monkeypatch.setattr(inferq.engine.loop, "_EXIT_SECONDS", 0.1)
    code = "import os, sys, time; os.close(int(sys.argv[sys.argv.index('--fd') + 1])); time.sleep(600)"
    engine = AsyncInferenceEngine(EngineConfig(), command=(sys.executable, "-c", code))
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        await engine.start_engine_loop()
    assert started() == set()


async def test_a_failure_in_the_loop_itself_is_a_death(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make("--step-ms", "2")
    await engine.start_engine_loop()
    stream = await engine.add_request("r", "a", sampling=LONG)
    await running(stream)
    engine._supervisor._loop._on_message = lambda _: 1 / 0
    with pytest.raises(EngineDeadError, match="the engine's loop failed: ZeroDivisionError"):
        await read_all(stream)
    assert "ZeroDivisionError" in caplog.text


async def test_a_step_in_the_wrong_form_is_a_death(make: Make) -> None:
    engine = make()
    await engine.start_engine_loop()
    stream = await engine.add_request("r", "a", sampling=LONG)
    await running(stream)
    take = engine._supervisor._loop._on_message
    engine._supervisor._loop._on_message = lambda _: take(Step([["what", "is", "this"]], Stats(0, 0, 0, 0, 0, 0)))
    with pytest.raises(EngineDeadError, match="'this' is not a valid FinishReason"):
        await read_all(stream)


# ---- start ----


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--fail-load", "no such model"], "failed: RuntimeError: no such model"),
        (["--no-such-flag"], "exited with code 2"),
    ],
)
async def test_a_start_that_fails_says_why_also_to_those_who_wait(make: Make, flags: list[str], says: str) -> None:
    engine = make(*flags)
    held = await engine.add_request("held", "a")
    with pytest.raises(EngineDeadError, match=says):
        await engine.start_engine_loop()
    with pytest.raises(EngineDeadError, match=says):
        await read_all(held)
    with pytest.raises(EngineDeadError, match=says):
        await engine.start_engine_loop()


async def test_a_command_that_is_not_there(cache: Path) -> None:
    engine = AsyncInferenceEngine(EngineConfig(), command=("/no/such/engine",))
    with pytest.raises(EngineDeadError, match=r"could not be started: .*No such file"):
        await engine.start_engine_loop()


async def test_a_model_without_a_tokenizer_does_not_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()

    def broken(text_dir: str) -> None:
        raise FileNotFoundError(f"{text_dir}/tokenizer.json")

    monkeypatch.setattr("inferq.engine.async_engine.load_text", broken)
    with pytest.raises(EngineDeadError, match="could not be started: FileNotFoundError"):
        await engine.start_engine_loop()
    assert not engine.is_running


async def test_a_child_that_dies_while_its_text_side_is_loaded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    dead = threading.Event()

    def kill_and_wait(text_dir: str) -> None:
        child_of(engine).kill()
        assert dead.wait(20)

    monkeypatch.setattr("inferq.engine.async_engine.load_text", kill_and_wait)
    watcher = asyncio.create_task(engine.wait_dead())
    watcher.add_done_callback(lambda _: dead.set())
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        await engine.start_engine_loop()
    await watcher
    assert not engine.is_running


async def test_a_start_is_once(make: Make) -> None:
    engine = make()
    starting = asyncio.create_task(engine.start_engine_loop())
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="started before"):
        await engine.start_engine_loop()
    await starting
    with pytest.raises(EngineError, match="started before"):
        await engine.start_engine_loop()
    assert engine.is_running


@pytest.mark.parametrize("child_exists", [False, True])
async def test_a_start_that_is_cancelled_leaves_no_child(make: Make, child_exists: bool, started: Started) -> None:
    engine = make("--load-ms", "600000")
    held = await engine.add_request("held", "a")
    starting = asyncio.create_task(engine.start_engine_loop())
    await (wait_until(lambda: engine._supervisor._loop._process) if child_exists else asyncio.sleep(0))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert started() == set()
    with pytest.raises(EngineDeadError):
        await read_all(held)


async def test_a_loop_that_is_cancelled_before_its_first_step_ends_the_start(make: Make) -> None:
    engine = make()
    starting = asyncio.create_task(engine.start_engine_loop())
    await asyncio.sleep(0)
    assert engine._supervisor._loop._task is not None
    engine._supervisor._loop._task.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(EngineDeadError, match="loop was cancelled"):
            await starting


@pytest.mark.parametrize("child_exists", [False, True])
async def test_a_stop_during_the_start_ends_both(make: Make, child_exists: bool, started: Started) -> None:
    engine = make("--load-ms", "600000")
    starting = asyncio.create_task(engine.start_engine_loop())
    await (wait_until(lambda: engine._supervisor._loop._process) if child_exists else asyncio.sleep(0))
    with contextlib.suppress(EngineDeadError):
        await asyncio.gather(engine.stop(), starting)
    assert started() == set()
    with pytest.raises(EngineDeadError, match="stopped"):
        await starting


# ---- stop ----


async def test_stop_ends_the_streams_and_may_come_again_and_from_many(make: Make) -> None:
    engine = make("--step-ms", "2")
    await engine.start_engine_loop()
    child = child_of(engine)
    stream = await engine.add_request("r", "a", sampling=LONG)
    await running(stream)
    await asyncio.gather(engine.stop(), engine.stop())
    await engine.stop()
    assert not psutil.pid_exists(child.pid)
    with pytest.raises(EngineDeadError, match="the engine was stopped"):
        await read_all(stream)
    with pytest.raises(EngineDeadError, match="the engine was stopped"):
        await engine.start_engine_loop()


async def test_a_stopped_child_has_ended_in_good_order(make: Make) -> None:
    engine = make()
    await engine.start_engine_loop()
    await engine.complete("a", sampling=up_to(3))
    process = engine._supervisor._loop._process
    assert process is not None
    await engine.stop()
    assert await process.wait() == 0


async def test_stop_before_the_start(make: Make) -> None:
    engine = make()
    held = await engine.add_request("held", "a")
    await engine.stop()
    with pytest.raises(EngineDeadError, match="stopped"):
        await read_all(held)
    with pytest.raises(EngineDeadError, match="stopped"):
        await engine.start_engine_loop()


def test_an_event_loop_that_ends_takes_the_child_with_it(cache: Path) -> None:
    """`asyncio.run` cancels the engine's task: nobody had to call stop."""

    async def forget_to_stop() -> int:
        engine = scripted_engine(cache)
        await engine.start_engine_loop()
        return child_of(engine).pid

    assert not psutil.pid_exists(asyncio.run(forget_to_stop()))


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux' own")
async def test_kill_9_of_the_engines_process_leaves_no_child(cache: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from support.engines import LONG, running, scripted_engine
async def main():
    engine = scripted_engine(Path({str(cache)!r}), "--step-ms", "600000")
    await engine.start_engine_loop()
    await engine.add_request("r", "a", sampling=LONG)
    print(engine._supervisor._loop._process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    await all_gone([child])
