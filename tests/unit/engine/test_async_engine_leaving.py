"""How a request of the engine ends before its answer does, and what is left of it: nothing."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest
from support.engines import LONG, Start, answer, read_all, running, text_of, until_drained, up_to
from support.fake_engine import ListSink
from support.waiting import wait_until

from inferq.engine import (
    FinishReason,
    SamplingParams,
    StreamClosedError,
)


async def test_a_stop_string_across_tokens_ends_the_request_and_frees_its_blocks(start: Start) -> None:
    engine = await start("--step-ms", "1")
    whole = answer("stop here", 40)
    stop = whole[17:20]
    completion = await engine.complete("stop here", sampling=SamplingParams(max_tokens=30_000, stop=(stop,)))
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.STOP, whole.index(stop) + 3)
    await until_drained(engine)


async def test_tokens_past_a_stop_string_are_not_counted(start: Start) -> None:
    engine = await start("--tokens-per-step", "16")
    whole = answer("many", 32)
    completion = await engine.complete("many", sampling=SamplingParams(max_tokens=1000, stop=(whole[5:8],)))
    assert (completion.text, len(completion.token_ids)) == (whole[:5], 8)


async def test_an_abort_frees_the_blocks_and_keeps_what_was_generated(start: Start) -> None:
    engine = await start("--step-ms", "5")
    stream = await engine.add_request("r", "long", sampling=LONG)
    await running(stream)
    assert engine.abort("r") is True
    stats = await engine.freed("r")
    assert stats is not None
    assert (stats.used_blocks, stats.running) == (0, 0)
    deltas = await read_all(stream)
    assert deltas[-1].finish_reason is FinishReason.CANCELLED
    assert answer("long", 1000)[1:].startswith(text_of(deltas))
    assert engine.abort("r") is False


async def test_an_abort_of_a_waiting_request_leaves_nothing(start: Start) -> None:
    engine = await start("--step-ms", "2", max_num_seqs=2)
    streams = [await engine.add_request(f"r{i}", f"prompt {i}", sampling=up_to(30)) for i in range(10)]
    waiting = list(range(2, 10))
    random.Random(25).shuffle(waiting)
    for number in waiting:
        await anext(streams[0])
        assert engine.abort(f"r{number}")
    ends = [(await read_all(stream))[-1].finish_reason for stream in streams]
    assert ends == [FinishReason.LENGTH] * 2 + [FinishReason.CANCELLED] * 8
    await until_drained(engine)


async def test_add_abort_add_without_a_pause_in_between(start: Start) -> None:
    engine = await start(max_waiting=400)
    prompt = list(b"again")
    sinks = []
    for number in range(200):
        first, second = ListSink(), ListSink()
        engine.submit(f"x{number}", prompt, up_to(3), first)
        assert engine.abort(f"x{number}")
        engine.submit(f"x{number}", prompt, up_to(3), second)
        sinks.append((first, second))
    await wait_until(lambda: all(second.num_ends for _, second in sinks))
    for first, second in sinks:
        assert (first.finish_reason, first.num_ends) == (FinishReason.CANCELLED, 1)
        assert (second.text, second.finish_reason, second.num_ends) == (answer("again", 3), FinishReason.LENGTH, 1)


async def test_two_hundred_aborts_at_random_moments_beside_a_healthy_request(start: Start) -> None:
    engine = await start("--step-ms", "2")
    dice = random.Random(29)
    healthy = asyncio.create_task(engine.complete("healthy", sampling=up_to(300)))

    async def one(number: int) -> None:
        stream = await engine.add_request(f"r{number}", f"prompt {number}", sampling=up_to(20))
        await asyncio.sleep(dice.uniform(0, 0.05))
        engine.abort(f"r{number}")
        deltas = await read_all(stream)
        assert answer(f"prompt {number}", 20).startswith(text_of(deltas))

    await asyncio.gather(*(one(number) for number in range(200)))
    assert (await healthy).text == answer("healthy", 300)


async def test_after_one_abort_the_others_and_the_next_are_served(start: Start) -> None:
    engine = await start("--step-ms", "2")
    others = [asyncio.create_task(engine.complete(f"other {i}", sampling=up_to(50))) for i in range(2)]
    stream = await engine.add_request("r", "r", sampling=LONG)
    await running(stream)
    engine.abort("r")
    assert [(await other).text for other in others] == [answer(f"other {i}", 50) for i in range(2)]
    assert (await engine.complete("next", sampling=up_to(5))).text == answer("next", 5)


async def test_leaving_generate_early_aborts_in_each_way(start: Start) -> None:
    engine = await start("--step-ms", "2")

    async for delta in engine.generate("break", sampling=LONG):
        assert delta.text
        break
    await until_drained(engine)

    deltas = engine.generate("aclose", sampling=LONG)
    await anext(deltas)
    await deltas.aclose()
    await until_drained(engine)

    deltas = engine.generate("collected", sampling=LONG)
    await anext(deltas)
    del deltas
    gc.collect()
    await until_drained(engine)

    task = asyncio.create_task(engine.complete("cancelled", sampling=LONG, request_id="c"))
    await wait_until(lambda: engine.num_requests == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_drained(engine)

    stream = await engine.add_request("closed", "closed", sampling=LONG)
    await running(stream)
    await stream.aclose()
    with pytest.raises(StreamClosedError):
        await anext(stream)
    await until_drained(engine)


async def test_freed_of_an_unknown_request_is_done_at_once(start: Start) -> None:
    engine = await start()
    assert await engine.freed("nobody") is None
    freed = None
    async for _ in engine.generate("r", request_id="r", sampling=up_to(3)):
        freed = freed or engine.freed("r")
    assert freed is not None
    stats = await freed
    assert stats is not None
    assert stats.used_blocks == 0
