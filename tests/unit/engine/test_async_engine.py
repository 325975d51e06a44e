"""The engine as its user holds it, over the scripted child: adding, reading, stopping early, and every refusal."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import LONG, answer, read_all, running, scripted_engine, text_of, until_drained, up_to
from support.fake_engine import ListSink
from support.scripted import VOCAB_SIZE, continuation
from support.waiting import wait_until

from inferq.engine import (
    AsyncInferenceEngine,
    DuplicateRequestError,
    EngineError,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
    RequestFailedError,
    SamplingParams,
    StreamClosedError,
)
from inferq.engine.admission import Prompt
from inferq.engine.pipe import Log
from inferq.engine.stream import HIGH_WATER_TOKENS

Start = Callable[..., Awaitable[AsyncInferenceEngine]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
async def start(cache: Path) -> AsyncIterator[Start]:
    """Starts engines; at the end each must be drained, and is stopped."""
    engines: list[AsyncInferenceEngine] = []

    async def start_engine(*flags: str, **config: Any) -> AsyncInferenceEngine:
        engine = scripted_engine(cache, *flags, **config)
        engines.append(engine)
        await engine.start_engine_loop()
        return engine

    yield start_engine
    for engine in engines:
        if engine.is_running:
            await until_drained(engine)
        await engine.stop()


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


async def test_the_same_id_twice_is_refused_and_the_first_is_as_it_would_be_alone(start: Start) -> None:
    engine = await start("--step-ms", "2")
    first = await engine.add_request("x", "first", sampling=up_to(40))
    head = await running(first)
    with pytest.raises(DuplicateRequestError, match="'x'"):
        await engine.add_request("x", "second", sampling=up_to(40))
    gc.collect()  # the refused request's stream is gone, and aborts nobody
    assert head.text + text_of(await read_all(first)) == answer("first", 40)


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
