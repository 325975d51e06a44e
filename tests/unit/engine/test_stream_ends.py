"""A stream's two ends: its four answers, its credit, and every way to let go of it."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_until

from inferq.engine.errors import EngineDeadError, InvalidRequestError
from inferq.engine.request import Delta, FinishReason
from inferq.engine.stream import (
    HIGH_WATER_TOKENS,
    LOW_WATER_TOKENS,
    AsyncStream,
    EndOfStream,
    StreamClosedError,
    StreamControl,
    StreamSink,
    open_stream,
)


class Calls:
    """What a stream asked for its request."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def open(self) -> tuple[StreamSink, AsyncStream]:
        made = self.made
        control = StreamControl(
            lambda: made.append("abort"), lambda: made.append("pause"), lambda: made.append("resume")
        )
        return open_stream("r", control)


def delta(index: int, text: str = "x", reason: FinishReason | None = None, num_tokens: int = 1) -> Delta:
    return Delta(index, index, text, tuple(range(num_tokens)), reason)


def last(index: int) -> Delta:
    return delta(index, "", FinishReason.LENGTH)


async def test_the_four_answers_differ() -> None:
    sink, stream = Calls().open()
    assert stream.receive_nowait() is None
    sink.put(delta(0))
    sink.put(last(1))
    assert stream.receive_nowait() == delta(0)
    assert stream.receive_nowait() == last(1)
    with pytest.raises(EndOfStream):
        stream.receive_nowait()

    sink, stream = Calls().open()
    sink.put(delta(0))
    sink.fail(InvalidRequestError("no"))
    assert stream.receive_nowait() == delta(0), "what came before the failure is still read"
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="no"):
            stream.receive_nowait()

    sink, stream = Calls().open()
    sink.put(delta(0))
    await stream.aclose()
    with pytest.raises(StreamClosedError, match="closed by its reader"):
        stream.receive_nowait()


async def test_iteration_ends_after_the_last_delta_and_stays_ended() -> None:
    sink, stream = Calls().open()
    sink.put(delta(0))
    sink.put(last(1))
    assert [d.index async for d in stream] == [0, 1]
    assert [d async for d in stream] == []


async def test_a_waiting_reader_wakes_for_each_kind_of_end() -> None:
    for end, expected in (
        (lambda sink, stream: sink.put(last(0)), None),
        (lambda sink, stream: sink.fail(EngineDeadError("gone")), EngineDeadError),
        (lambda sink, stream: stream._close(), StreamClosedError),
    ):
        sink, stream = Calls().open()
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        end(sink, stream)
        if expected is None:
            assert await reader == last(0)
        else:
            with pytest.raises(expected):
                await reader


async def test_after_an_end_nothing_is_taken() -> None:
    sink, stream = Calls().open()
    sink.put(last(0))
    sink.put(delta(1))
    sink.fail(EngineDeadError("late"))
    assert [d.index async for d in stream] == [0]


@given(script=st.lists(st.sampled_from(["put", "read", "cancel", "wake-and-cancel"]), max_size=40))
def test_a_cancelled_receiver_loses_no_delta(script: list[str]) -> None:
    """Readers come and go, cancelled while they wait or in the very moment that something comes."""

    async def play() -> None:
        sink, stream = Calls().open()
        sent, got = 0, []
        for action in script:
            reader = None
            if action == "put" or not sent:
                sink.put(delta(sent))
                sent += 1
            elif action == "read" and len(got) < sent:
                got.append((await anext(stream)).index)
            elif len(got) == sent:  # nothing to read: this one waits, and is cancelled
                reader = asyncio.create_task(anext(stream))
                await asyncio.sleep(0)
                if action == "wake-and-cancel":
                    sink.put(delta(sent))
                    sent += 1
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
        sink.put(last(sent))
        got += [d.index async for d in stream]
        assert got == list(range(sent + 1))

    asyncio.run(play())


async def test_two_readers_at_once_are_told_so() -> None:
    sink, stream = Calls().open()
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks read the stream of request 'r' at once"):
        await anext(stream)
    sink.put(delta(0))
    # The first has been woken, but has not run yet: the delta is still its own.
    with pytest.raises(RuntimeError, match="two tasks"):
        stream.receive_nowait()
    assert await first == delta(0)
    sink.put(last(1))
    assert await anext(stream) == last(1), "one after the other is fine"


async def test_unread_tokens_pause_the_request_and_reading_resumes_it() -> None:
    calls = Calls()
    sink, stream = calls.open()
    for index in range(HIGH_WATER_TOKENS):
        sink.put(delta(index))
    assert calls.made == []
    sink.put(delta(HIGH_WATER_TOKENS))
    sink.put(delta(HIGH_WATER_TOKENS + 1))  # a step that was on its way
    assert calls.made == ["pause"]
    for _ in range(HIGH_WATER_TOKENS + 2 - LOW_WATER_TOKENS - 1):
        await anext(stream)
    assert calls.made == ["pause"]
    await anext(stream)
    assert calls.made == ["pause", "resume"]
    await stream.aclose()


async def test_credit_counts_tokens_not_deltas() -> None:
    calls = Calls()
    sink, stream = calls.open()
    sink.put(delta(0, num_tokens=HIGH_WATER_TOKENS + 1))
    assert calls.made == ["pause"]
    await anext(stream)
    assert calls.made == ["pause", "resume"]
    sink.put(delta(0, "", FinishReason.STOP, num_tokens=10 * HIGH_WATER_TOKENS))
    await anext(stream)
    assert calls.made == ["pause", "resume"], "a request that has ended needs no credit"


async def test_aclose_aborts_once_and_only_what_lives() -> None:
    calls = Calls()
    _, stream = calls.open()
    await stream.aclose()
    await stream.aclose()
    assert calls.made == ["abort"]

    calls = Calls()
    sink, stream = calls.open()
    sink.put(last(0))
    await stream.aclose()
    del stream
    gc.collect()
    await asyncio.sleep(0)
    assert calls.made == []


async def test_leaving_the_iteration_aborts() -> None:
    calls = Calls()
    sink, stream = calls.open()
    sink.put(delta(0))
    async with aclosing(stream):
        async for _ in stream:
            break
    assert calls.made == ["abort"]


async def test_an_abandoned_stream_aborts() -> None:
    calls = Calls()
    sink, stream = calls.open()
    sink.put(delta(0))
    async for _ in stream:
        break
    del stream
    await wait_until(lambda: calls.made == ["abort"])
    sink.put(delta(1))  # what was on its way harms nobody


async def test_a_stream_collected_in_another_thread_aborts_in_its_loop() -> None:
    threads: list[threading.Thread] = []
    control = StreamControl(lambda: threads.append(threading.current_thread()), lambda: None, lambda: None)
    _, stream = open_stream("r", control)
    holder = [stream]
    del stream
    await asyncio.to_thread(holder.clear)
    await wait_until(lambda: threads)
    assert threads == [threading.main_thread()]


def test_a_stream_that_outlives_its_loop_is_harmless() -> None:
    async def make() -> AsyncStream:
        return Calls().open()[1]

    stream = asyncio.run(make())
    del stream
    gc.collect()


async def test_collect_puts_the_answer_together() -> None:
    sink, stream = Calls().open()
    sink.count_prompt(7)
    sink.put(Delta(0, 0, "ab", (1, 2)))
    sink.put(Delta(2, 2, "c", (3,), FinishReason.STOP))
    completion = await stream.collect()
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("abc", (1, 2, 3), FinishReason.STOP)
    assert (completion.request_id, completion.prompt_tokens) == ("r", 7)
    with pytest.raises(StreamClosedError, match="read to its end before"):
        await stream.collect()
