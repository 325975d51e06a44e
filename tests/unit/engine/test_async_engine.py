"""The engine as its user holds it, over the scripted child: adding, reading, and every refusal."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.engines import LONG, Start, answer, read_all, running, scripted_engine, text_of, until_drained, up_to
from support.fake_engine import ListSink
from support.scripted import VOCAB_SIZE, continuation
from support.waiting import wait_until

from inferq.engine import (
    DuplicateRequestError,
    EngineError,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
    RequestFailedError,
    SamplingParams,
)
from inferq.engine.admission import Prompt
from inferq.engine.pipe import Log
from inferq.engine.stream import HIGH_WATER_TOKENS


async def test_deltas_of_a_request_make_up_its_answer(start: Start) -> None:
    engine = await start()
    assert engine.is_running
    stream = await engine.add_request("r", "Hello", sampling=up_to(20))
    deltas = await read_all(stream)
    assert text_of(deltas) == answer("Hello", 20)
    assert [d.index for d in deltas] == list(range(20)) == [d.at for d in deltas]
    assert [d.finish_reason for d in deltas] == [None] * 19 + [FinishReason.LENGTH]
    assert engine.num_requests == 0
    assert "running, 0 requests" in repr(engine)


async def test_the_three_kinds_of_prompt(start: Start) -> None:
    engine = await start()
    messages = [{"role": "user", "content": "Hi"}]
    token_ids = engine.text.encode_chat(messages)
    first, second, third = await asyncio.gather(
        engine.complete("Hi", sampling=up_to(8)),
        engine.complete(prompt_token_ids=list(b"Hi"), sampling=up_to(8), request_id="mine"),
        engine.complete(messages=messages, sampling=up_to(8)),
    )
    assert first.text == second.text == answer("Hi", 8)
    assert (second.request_id, second.prompt_tokens, second.finish_reason) == ("mine", 2, FinishReason.LENGTH)
    assert list(third.token_ids) == continuation(token_ids, 8)
    assert third.prompt_tokens == len(token_ids) == len(await engine.tokenize(Prompt(messages=messages)))


async def test_without_max_tokens_the_answer_fills_the_context(start: Start) -> None:
    engine = await start(max_model_len=64)
    completion = await engine.complete("x" * 60)
    assert (len(completion.token_ids), completion.finish_reason) == (4, FinishReason.LENGTH)
    assert len((await engine.complete("x" * 63)).token_ids) == 1


async def test_facts_and_text_come_with_ready(cache: Path) -> None:
    engine = scripted_engine(cache)
    for read in (lambda: engine.facts, lambda: engine.text, lambda: engine.submit("r", [1], LONG, ListSink())):
        with pytest.raises(EngineError, match="not ready"):
            read()
    assert not engine.is_running
    async with engine:
        assert engine.facts.vocab_size == VOCAB_SIZE
        assert engine.text.encode("a") == [97]
    assert not engine.is_running


INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of"),
    ({"prompt": ""}, "empty"),
    ({"prompt_token_ids": []}, "empty"),
    ({"messages": []}, "empty"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one of"),
    ({"prompt_token_ids": [-1]}, "token id -1"),
    ({"prompt_token_ids": [VOCAB_SIZE]}, f"token id {VOCAB_SIZE}"),
    ({"prompt_token_ids": [2**63]}, "outside the vocabulary"),
    ({"prompt": "hi \ud800 x"}, "Unicode"),
    ({"prompt": "x" * 64}, "64 tokens, and max_model_len is 64"),
    ({"prompt": "x" * 65}, "65 tokens, and max_model_len is 64"),
    ({"prompt": "x" * 100_000}, "100000 characters"),
    ({"prompt": "x" * 8, "sampling": up_to(57)}, "together 65"),
    ({"prompt": "x", "sampling": SamplingParams(stop_token_ids=(VOCAB_SIZE,))}, "stop_token_ids"),
    ({"messages": ["not an object"]}, "object"),
    ({"prompt": "REFUSE me"}, "told to refuse"),
]


async def test_what_is_wrong_with_a_request_harms_nobody_else(start: Start) -> None:
    """Each hostile request runs beside a healthy one, whose answer stays its own; the next one is served."""
    engine = await start("--step-ms", "1", "--refuse-text", "REFUSE", max_model_len=64)
    for request, says in INVALID:
        healthy = asyncio.create_task(engine.complete("healthy", sampling=up_to(10)))
        with pytest.raises(InvalidRequestError, match=says):
            await engine.complete(**request)
        assert (await healthy).text == answer("healthy", 10)
    assert (await engine.complete("next", sampling=up_to(5))).text == answer("next", 5)


async def test_a_held_request_learns_from_its_stream_what_is_wrong(cache: Path) -> None:
    engine = scripted_engine(cache, "--refuse-text", "REFUSE", max_model_len=64)
    bad = await engine.add_request("bad", prompt_token_ids=[-1])
    refused = await engine.add_request("refused", "REFUSE")
    aborted = await engine.add_request("aborted", "x")
    good = await engine.add_request("good", "good", sampling=up_to(5))
    assert engine.abort("aborted")
    with pytest.raises(DuplicateRequestError):
        await engine.add_request("good", "x")
    async with engine:
        with pytest.raises(InvalidRequestError, match="token id -1"):
            await anext(bad)
        with pytest.raises(InvalidRequestError, match="told to refuse"):
            await anext(refused)
        assert [d.finish_reason for d in await read_all(aborted)] == [FinishReason.CANCELLED]
        assert text_of(await read_all(good)) == answer("good", 5)
        await until_drained(engine)


async def test_the_same_id_twice_is_refused_and_the_first_is_as_it_would_be_alone(start: Start) -> None:
    engine = await start("--step-ms", "2")
    first = await engine.add_request("x", "first", sampling=up_to(40))
    head = await running(first)
    with pytest.raises(DuplicateRequestError, match="'x'"):
        await engine.add_request("x", "second", sampling=up_to(40))
    gc.collect()  # the refused request's stream is gone, and aborts nobody
    assert head.text + text_of(await read_all(first)) == answer("first", 40)


async def test_a_reader_that_stops_reading_pauses_its_request_alone(start: Start) -> None:
    engine = await start("--step-ms", "1")
    slow = await engine.add_request("slow", "slow", sampling=up_to(2000))
    await wait_until(lambda: len(slow._channel.unread) > HIGH_WATER_TOKENS)
    # The pause is on its way before this one, so it holds when this one is answered.
    assert (await engine.complete("one", sampling=up_to(5))).text == answer("one", 5)
    unread = len(slow._channel.unread)
    assert (await engine.complete("quick", sampling=up_to(300))).text == answer("quick", 300)
    assert len(slow._channel.unread) == unread < 2000
    assert text_of(await read_all(slow)) == answer("slow", 2000)


async def test_pause_and_resume_by_id(start: Start) -> None:
    engine = await start("--step-ms", "1")
    sink = ListSink()
    engine.submit("r", list(b"paused"), up_to(200), sink)
    await wait_until(lambda: sink.deltas)
    engine.pause("r")
    await engine.complete("flush", sampling=up_to(2))
    seen = len(sink.deltas)
    await engine.complete("other", sampling=up_to(50))
    assert len(sink.deltas) == seen < 200
    engine.resume("r")
    await wait_until(lambda: sink.num_ends)
    assert sink.text == answer("paused", 200)
    engine.pause("r")
    engine.resume("r")


async def test_as_many_requests_as_agreed_and_no_more(start: Start) -> None:
    engine = await start("--step-ms", "2", max_num_seqs=2, max_waiting=3)
    streams = [await engine.add_request(f"r{i}", "x", sampling=LONG) for i in range(5)]
    with pytest.raises(EngineOverloadedError, match="max_num_seqs \\+ max_waiting is 5"):
        await engine.add_request("r5", "x")
    for stream in streams:
        await stream.aclose()
    assert (await engine.complete("x", sampling=up_to(3))).text == answer("x", 3)


async def test_a_fault_at_the_third_token_reaches_its_consumer_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start("--step-ms", "1")

    class Broken:
        pushes = 0

        def replay(self, token_ids: Any, finish_reason: Any) -> Any:
            return good.replay(token_ids, finish_reason)

        def push(self, token_ids: Any, finish_reason: Any) -> Any:
            self.pushes += 1
            if self.pushes == 3:
                raise ZeroDivisionError("injected")
            return good.push(token_ids, finish_reason)

    healthy = asyncio.create_task(engine.complete("healthy", sampling=up_to(50)))
    await wait_until(lambda: engine.num_requests == 1)
    good = engine.text.output(LONG)
    monkeypatch.setattr(type(engine.text), "output", lambda *_: Broken())
    stream = await engine.add_request("r", "broken", sampling=LONG)
    monkeypatch.undo()
    with pytest.raises(RequestFailedError, match="injected"):
        async with asyncio.timeout(20):
            await read_all(stream)
    assert "request r failed" in caplog.text
    assert (await healthy).text == answer("healthy", 50)
    assert (await engine.complete("next", sampling=up_to(5))).text == answer("next", 5)


async def test_the_childs_log_goes_where_it_is_asked_to(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[Log] = []
    await start(log=lines.append)
    assert [(line.level, line.event) for line in lines] == [("info", "scripted_engine_loaded")]

    caplog.set_level(logging.INFO)
    await start()
    assert "scripted_engine_loaded" in caplog.text

    def broken(_: Log) -> None:
        raise OSError("disk full")

    engine = await start(log=broken)
    assert (await engine.complete("x", sampling=up_to(3))).text == answer("x", 3)


def test_importing_the_engine_loads_no_model_library() -> None:
    code = (
        "import sys, inferq.engine as e; assert e.AsyncInferenceEngine;"
        "heavy = {'torch', 'transformers', 'numpy', 'redis', 'tokenizers', 'jinja2'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


async def test_serving_a_chat_loads_no_torch(cache: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from support.engines import scripted_engine, up_to
async def main():
    async with scripted_engine(Path({str(cache)!r})) as engine:
        await engine.complete(messages=[{{"role": "user", "content": "Hi"}}], sampling=up_to(4))
asyncio.run(main())
sys.exit(", ".join({{"torch", "transformers"}} & set(sys.modules)) or None)
"""
    result = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_every_public_name_is_exported() -> None:
    import inferq.engine as engine

    assert engine.__all__ == sorted(engine.__all__)
    assert all(hasattr(engine, name) for name in engine.__all__)
    public = {name for name, value in vars(engine).items() if isinstance(value, type) and not name.startswith("_")}
    assert public == set(engine.__all__)
