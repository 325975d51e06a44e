"""A long prompt is tokenized in a thread: what happens to the event loop and to the request meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.engines import Start, answer, read_all, up_to
from support.waiting import wait_until

from inferq.engine import (
    FinishReason,
)
from inferq.engine.admission import Prompt


@pytest.mark.parametrize("chat", [False, True])
async def test_the_event_loop_goes_round_while_a_long_prompt_is_tokenized(start: Start, chat: bool) -> None:
    """In a thread, and without the interpreter's lock: else the loop would get one turn or two."""
    engine = await start(max_model_len=1_000_000, max_num_batched_tokens=1_000_000, num_blocks=100_000)
    content = "all work and no play makes Jack a dull boy. " * 10_000
    prompt = Prompt(messages=[{"role": "user", "content": content}]) if chat else Prompt(content)
    tokenizing = asyncio.create_task(engine.tokenize(prompt))
    turns = 0
    while not tokenizing.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await tokenizing) >= len(content)
    assert turns > 20


async def test_an_add_that_is_cancelled_while_it_tokenizes_gives_its_id_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start(max_model_len=16_000)
    reached, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> list[int]:
        reached.set()
        go_on.wait()
        return [1]

    monkeypatch.setattr("inferq.engine.admission.Prompt.encode", slow)
    adding = asyncio.create_task(engine.add_request("r", "x" * 10_000))
    await wait_until(reached.is_set)
    monkeypatch.undo()
    assert engine.num_requests == 1
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    go_on.set()
    assert engine.num_requests == 0
    assert (await engine.complete("x", request_id="r", sampling=up_to(3))).text == answer("x", 3)


async def test_an_abort_while_the_prompt_is_tokenized_is_not_lost(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start(max_model_len=16_000)
    steps_before = engine.stats
    reached, go_on = threading.Event(), threading.Event()

    def later(*_: object) -> list[int]:
        reached.set()
        go_on.wait()
        return [1]

    monkeypatch.setattr("inferq.engine.admission.Prompt.encode", later)
    adding = asyncio.create_task(engine.add_request("r", "x" * 10_000))
    await wait_until(reached.is_set)
    assert engine.abort("r")
    go_on.set()
    assert [d.finish_reason for d in await read_all(await adding)] == [FinishReason.CANCELLED]
    assert engine.idle
    assert engine.stats is steps_before, "the child has never heard of it"
