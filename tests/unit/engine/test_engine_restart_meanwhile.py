"""What is asked, held and said while an engine has no child, or one that is on its way out."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest
from support.engines import (
    LONG,
    Start,
    answer,
    child_of,
    read_all,
    running,
    scripted_engine,
    text_of,
    up_to,
)
from support.fake_engine import ListSink
from support.restarting import PATIENT, all_answered, is_up, submit, until_down
from support.waiting import wait_until

from inferq.engine import (
    EngineDeadError,
    FinishReason,
    RestartPolicy,
)
from inferq.engine.stream import HIGH_WATER_TOKENS


async def test_what_is_asked_while_the_child_is_down(start_restarting: Start) -> None:
    """An abort ends at once, an add waits, a pause holds, a resume lets go."""
    engine = await start_restarting("--step-ms", "2", "--load-ms", "400")
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


async def test_a_reader_that_stopped_reading_gets_all_of_it_across_a_death(start_restarting: Start) -> None:
    engine = await start_restarting("--step-ms", "1")
    slow = await engine.add_request("slow", "slow", sampling=up_to(1000))
    await wait_until(lambda: len(slow._channel.unread) > HIGH_WATER_TOKENS)
    await until_down(engine)
    unread = len(slow._channel.unread)
    assert (await engine.complete("quick", sampling=up_to(100))).text == answer("quick", 100)
    assert len(slow._channel.unread) == unread, "it stays paused"
    assert text_of(await read_all(slow)) == answer("slow", 1000)


async def test_an_abort_on_its_way_to_a_child_that_dies_is_done(start_restarting: Start) -> None:
    engine = await start_restarting("--hang-on-text", "hang")
    sink = submit(engine, "hang", 50)
    freed = engine.freed("hang")
    child_of(engine).send_signal(signal.SIGSTOP)
    assert engine.abort("hang")
    assert sink.finish_reason is FinishReason.CANCELLED
    await until_down(engine)
    assert await freed is None
    assert (await engine.complete("next", sampling=up_to(5))).text == answer("next", 5)


async def test_the_next_child_gets_as_many_blocks_as_the_first(start_restarting: Start) -> None:
    engine = await start_restarting("--blocks", "77")
    engine._supervisor._command += ("--blocks", "55")
    child_of(engine).kill()
    await wait_until(lambda: engine.num_restarts == 1 and is_up(engine))
    assert engine.facts.num_blocks == 77


async def test_the_next_child_gets_the_attention_that_the_first_chose(start_restarting: Start) -> None:
    """Measured again, `auto` might come to another one, whose blocks are of another size."""
    engine = await start_restarting("--attention", "first")
    engine._supervisor._command += ("--attention", "second")
    child_of(engine).kill()
    await wait_until(lambda: engine.num_restarts == 1 and is_up(engine))
    assert engine.facts.attention == "first"


@pytest.mark.parametrize("when", ["in the backoff", "while it loads"])
async def test_a_stop_while_it_restarts_leaves_nothing(start_restarting: Start, when: str) -> None:
    backoff = 60 if when == "in the backoff" else 0
    policy = RestartPolicy(backoff_seconds=backoff, max_backoff_seconds=60, step_timeout_seconds=None)
    engine = await start_restarting(restart=policy)
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
    start_restarting: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start_restarting()
    assert engine._supervisor._task is not None
    engine._supervisor._task.cancel()
    assert "supervisor was cancelled" in str(await engine.wait_dead())

    engine = await start_restarting()
    monkeypatch.setattr(engine._supervisor, "_report", lambda *_: 1 / 0)
    child_of(engine).kill()
    assert "supervisor failed: ZeroDivisionError" in str(await engine.wait_dead())
    assert "ZeroDivisionError" in caplog.text
