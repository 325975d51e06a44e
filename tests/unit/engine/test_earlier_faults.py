"""The faults of the engine that this one descends from: each has a test here that would see it come back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import LONG, answer, read_all, running, scripted_engine, text_of, until_drained, up_to
from support.fake_engine import ListSink
from support.waiting import wait_until

from inferq.engine import (
    AsyncInferenceEngine,
    DuplicateRequestError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
)
from inferq.engine.stream import HIGH_WATER_TOKENS

Make = Callable[..., AsyncInferenceEngine]


@pytest.fixture
async def make(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Make]:
    cache: Path = tmp_path_factory.mktemp("cache")
    engines: list[AsyncInferenceEngine] = []

    def make_engine(*flags: str, **config: Any) -> AsyncInferenceEngine:
        engines.append(scripted_engine(cache, *flags, **config))
        return engines[-1]

    yield make_engine
    for engine in engines:
        await engine.stop()
        assert engine.idle


async def test_only_finished_sequences_reached_the_stream(make: Make) -> None:
    async with make("--step-ms", "20") as engine:
        stream = await engine.add_request("r", "a", sampling=up_to(10))
        first = await running(stream)
        assert (first.text, first.finish_reason) == (answer("a", 1), None)
        assert engine.num_requests == 1, "the request still runs while its first delta is read"
        rest = await read_all(stream)
        assert len(rest) > 1
        assert first.text + text_of(rest) == answer("a", 10)


async def test_aborts_never_reached_the_engine(make: Make) -> None:
    async with make("--step-ms", "5") as engine:
        stream = await engine.add_request("r", "a", sampling=LONG)
        beside = asyncio.create_task(engine.complete("b", sampling=up_to(40)))
        await running(stream)
        engine.abort("r")
        stats = await engine.freed("r")
        assert stats is not None
        assert stats.running == 1, "the child runs the other one alone"
        assert (await beside).text == answer("b", 40)
        await until_drained(engine)


async def test_an_abort_before_pickup_was_lost(make: Make) -> None:
    engine = make("--step-ms", "1")
    held = await engine.add_request("held", "a", sampling=LONG)
    engine.abort("held")
    async with engine:
        sink = ListSink()
        engine.submit("r", [97], LONG, sink)
        engine.abort("r")  # nothing has been written to the pipe yet
        for deltas in (await read_all(held), sink.deltas):
            assert [delta.finish_reason for delta in deltas] == [FinishReason.CANCELLED]
        await until_drained(engine)


async def test_an_abort_of_an_unknown_id_broke_the_loop(make: Make) -> None:
    async with make() as engine:
        assert engine.abort("nobody") is False
        await engine.complete("a", sampling=up_to(2), request_id="over")
        assert engine.abort("over") is False
        assert (await engine.complete("b", sampling=up_to(5))).text == answer("b", 5)


async def test_an_abort_in_the_step_that_finishes_broke_the_loop(make: Make) -> None:
    async with make() as engine:
        for number in range(50):
            aborted, same_step = ListSink(), ListSink()

            def abort_the_other(_: object, number: int = number) -> None:
                engine.abort(f"second{number}")

            # Both end in the child's same step; the first one's end aborts the second, whose own end is in the message.
            aborted.put = lambda delta, put=aborted.put: (put(delta), abort_the_other(delta))  # type: ignore[method-assign]
            engine.submit(f"first{number}", [97], up_to(1), aborted)
            engine.submit(f"second{number}", [98], up_to(1), same_step)
            await wait_until(lambda one=aborted, two=same_step: one.num_ends and two.num_ends)
            assert (aborted.num_ends, same_step.num_ends) == (1, 1)
        assert (await engine.complete("b", sampling=up_to(5))).text == answer("b", 5)
        await until_drained(engine)


async def test_closing_the_consumers_iterator_did_not_abort(make: Make) -> None:
    async with make("--step-ms", "2") as engine:
        deltas = engine.generate("a", sampling=LONG, request_id="r")
        await anext(deltas)
        freed = engine.freed("r")
        await deltas.aclose()
        stats = await freed
        assert stats is not None
        assert stats.used_blocks == 0

        async for _ in await engine.add_request("left", "a", sampling=LONG):
            break
        gc.collect()
        await until_drained(engine)


async def test_finished_requests_stayed_in_the_maps_and_their_ids_were_used_up(make: Make) -> None:
    async with make() as engine:
        for number in range(3):
            completion = await engine.complete(f"{number}", sampling=up_to(4), request_id="same")
            assert completion.text == answer(f"{number}", 4)
            assert engine.num_requests == 0
        stream = await engine.add_request("same", "a", sampling=LONG)
        engine.abort("same")
        again = await engine.add_request("same", "b", sampling=up_to(4))
        assert [d.finish_reason for d in await read_all(stream)] == [FinishReason.CANCELLED]
        assert text_of(await read_all(again)) == answer("b", 4)
        await until_drained(engine)


async def test_the_same_id_twice_in_one_tick_was_accepted(make: Make) -> None:
    async with make() as engine:
        outcomes = await asyncio.gather(
            *(engine.add_request("same", "a", sampling=up_to(4)) for _ in range(3)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes[1:]] == [DuplicateRequestError] * 2
        assert text_of(await read_all(outcomes[0])) == answer("a", 4)  # type: ignore[arg-type]


async def test_adding_before_the_loop_had_started_failed(make: Make) -> None:
    engine = make()
    before = await engine.add_request("before", "a", sampling=up_to(4))
    starting = asyncio.create_task(engine.start_engine_loop())
    await asyncio.sleep(0)
    meanwhile = await engine.add_request("meanwhile", "b", sampling=up_to(4))
    await starting
    assert text_of(await read_all(before)) == answer("a", 4)
    assert text_of(await read_all(meanwhile)) == answer("b", 4)


async def test_one_bad_request_killed_every_request(make: Make) -> None:
    async with make("--step-ms", "2", "--refuse-text", "REFUSE") as engine:
        good = asyncio.create_task(engine.complete("good", sampling=up_to(30)))
        await wait_until(lambda: engine.num_requests)
        with pytest.raises(InvalidRequestError):
            await engine.complete(prompt_token_ids=[-1])
        with pytest.raises(InvalidRequestError):
            await engine.complete("REFUSE")
        broken = ListSink(put_error=RuntimeError("a consumer's own fault"))
        engine.submit("broken", [97], LONG, broken)
        await wait_until(lambda: broken.errors)
        assert (await good).text == answer("good", 30)
        await until_drained(engine)


async def test_a_request_queued_during_a_failing_step_hung(make: Make) -> None:
    engine = make("--step-ms", "50", "--raise-after", "2")
    await engine.start_engine_loop()
    first = await engine.add_request("first", "a", sampling=LONG)
    await running(first)
    streams = [first]
    with pytest.raises(EngineError):  # adds until the death is seen: the last of them find a child that is gone
        while True:
            streams.append(await engine.add_request(f"r{len(streams)}", "a", sampling=LONG))
            await asyncio.sleep(0.002)
    assert len(streams) > 1
    for stream in streams:
        with pytest.raises(EngineDeadError, match="told to fail"):
            async with asyncio.timeout(20):
                await read_all(stream)


async def test_a_cancelled_loop_left_its_consumers_hanging(make: Make) -> None:
    engine = make("--step-ms", "5")
    await engine.start_engine_loop()
    stream = await engine.add_request("r", "a", sampling=LONG)
    waiting = asyncio.create_task(engine.complete("b", sampling=LONG))
    await running(stream)
    assert engine._supervisor._loop._task is not None
    engine._supervisor._loop._task.cancel()
    with pytest.raises(EngineDeadError, match="loop was cancelled"):
        await read_all(stream)
    with pytest.raises(EngineDeadError, match="loop was cancelled"):
        await waiting


async def test_after_a_failure_the_loop_restarted_on_dirty_state(make: Make) -> None:
    engine = make("--exit-after", "2")
    await engine.start_engine_loop()
    with pytest.raises(EngineDeadError):
        await engine.complete("a", sampling=LONG)
    assert not engine.is_running
    with pytest.raises(EngineDeadError, match="exited with code 70"):
        await engine.start_engine_loop()
    with pytest.raises(EngineDeadError, match="exited with code 70"):
        await engine.complete("a")
    assert engine.idle, "nothing of the failed requests is left"


async def test_waiting_requests_stalled_when_all_running_ones_ended_together(make: Make) -> None:
    async with make(max_num_seqs=4) as engine:
        wave = [engine.complete(f"{number}", sampling=up_to(6)) for number in range(20)]
        async with asyncio.timeout(60):
            completions = await asyncio.gather(*wave)
        assert [c.text for c in completions] == [answer(f"{number}", 6) for number in range(20)]

        streams = [await engine.add_request(f"r{number}", "a", sampling=LONG) for number in range(4)]
        waiting = asyncio.create_task(engine.complete("waiting", sampling=up_to(6)))
        await asyncio.gather(*(running(stream) for stream in streams))
        for number in range(4):
            engine.abort(f"r{number}")
        async with asyncio.timeout(60):
            assert (await waiting).text == answer("waiting", 6)


async def test_queues_were_unbounded(make: Make) -> None:
    async with make(max_num_seqs=2, max_waiting=2) as engine:
        stream = await engine.add_request("unread", "a", sampling=LONG)
        others = [await engine.add_request(f"r{number}", "a", sampling=LONG) for number in range(3)]
        with pytest.raises(EngineOverloadedError, match="max_num_seqs \\+ max_waiting is 4"):
            await engine.add_request("one too many", "a")
        for other in others:
            await other.aclose()
        await wait_until(lambda: len(stream._channel.unread) > HIGH_WATER_TOKENS)
        await engine.complete("b", sampling=up_to(5))  # answered after the pause has arrived
        unread = len(stream._channel.unread)
        await engine.complete("b", sampling=up_to(500))
        assert len(stream._channel.unread) == unread
        await stream.aclose()
