"""What goes wrong with one request leaves nothing behind of it, over a real child."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import LONG, answer, scripted_engine, until_drained, up_to
from support.waiting import wait_until

import inferq.engine.child
from inferq.engine import AsyncInferenceEngine, Delta, EngineError, EngineOverloadedError, SamplingParams


class Sink:
    def put(self, delta: Delta) -> None:
        pass

    def fail(self, error: EngineError) -> None:
        raise AssertionError(error)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncInferenceEngine]:
    async with scripted_engine(tmp_path, max_num_seqs=2, max_waiting=1) as running_engine:
        yield running_engine


async def test_a_request_that_cannot_be_sent_takes_no_place(
    engine: AsyncInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(inferq.engine.child, "MAX_UNSENT_BYTES", 10)
        for _ in range(5):
            with pytest.raises(EngineOverloadedError, match="wait to be sent"):
                engine.submit("a", [65], SamplingParams(), Sink())
            with pytest.raises(EngineOverloadedError, match="wait to be sent"):
                await engine.add_request("b", "text")
        assert engine.num_requests == 0
    assert (await engine.complete("hi", sampling=up_to(3))).text == answer("hi", 3)
    await until_drained(engine)


async def test_a_sampling_value_that_json_does_not_know_takes_no_place(engine: AsyncInferenceEngine) -> None:
    class Number(int):
        """Like numpy's: an integer by its __index__, for JSON an unknown type or not."""

    class Indexed:
        def __index__(self) -> int:
            return 3

    fields: Any = {"max_tokens": Indexed(), "seed": Number(5), "top_k": Indexed()}
    for _ in range(5):
        assert (await engine.complete("hi", sampling=SamplingParams(**fields))).text == answer("hi", 3)
    await until_drained(engine)


async def test_requests_that_are_aborted_before_the_engine_is_ready_are_let_go_at_once(tmp_path: Path) -> None:
    class Text(str):
        __slots__ = ("__weakref__",)

    engine = scripted_engine(tmp_path)
    prompts = [Text("x" * 100) for _ in range(3)]
    held = [weakref.ref(prompt) for prompt in prompts]
    streams = [await engine.add_request(str(n), prompt) for n, prompt in enumerate(prompts)]
    prompts.clear()
    engine.abort("0")
    await streams[1].aclose()
    del streams[2]
    await wait_until(lambda: engine.num_requests == 0, what="all ended")
    gc.collect()
    assert [prompt() for prompt in held] == [None] * 3
    async with engine:
        assert engine.stats is None, "the child has never heard of them"


async def test_neither_reader_nor_user_undoes_the_others_pause(engine: AsyncInferenceEngine) -> None:
    stream = await engine.add_request("a", "text", sampling=LONG)
    channel = stream._channel

    async def unread_after_more_steps() -> int:
        """What the child was told before is done, and it would have gone on with the request if it could."""
        await engine.complete("probe", sampling=up_to(3))
        return channel.num_unread_tokens

    await wait_until(lambda: channel.paused, what="the reader is behind")
    before = await unread_after_more_steps()
    engine.resume("a")
    assert await unread_after_more_steps() == before, "the user's resume does not undo flow control"

    engine.pause("a")
    while stream.receive_nowait() is not None:
        pass
    assert not channel.paused
    assert await unread_after_more_steps() == 0, "nor does the reader undo the user's pause"

    engine.resume("a")
    async with asyncio.timeout(60):
        await anext(stream)
    await stream.aclose()
    await until_drained(engine)
