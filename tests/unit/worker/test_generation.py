"""One request from claim to end, against an engine that is told what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.scripted_redis import ScriptedRedis
from support.waiting import wait_until

from inferq.engine.admission import Prompt
from inferq.engine.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from inferq.engine.request import Delta, FinishReason, SamplingParams
from inferq.engine.stream import Sink
from inferq.producer.contract import Keys
from inferq.producer.events import Finished
from inferq.producer.events import FinishReason as Reason
from inferq.worker import outbox
from inferq.worker.clock import RedisClock
from inferq.worker.commands import Claimed, Entry, Outcome
from inferq.worker.errors import Dropped, ServerFull, ShuttingDown
from inferq.worker.generate import Generation
from inferq.worker.prepare import failure
from inferq.worker.publisher import Publisher
from inferq.worker.recovery import Recovery


class ToldEngine:
    """Takes requests, and lets a test give them their output. An abort flushes `held`, as the engine's does."""

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.said: list[tuple[str, str]] = []
        self.refusal: Exception | None = None
        self.tokenizing: asyncio.Event | None = None
        self.held = ""
        self.sent = (0, 0)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        if self.tokenizing is not None:
            await self.tokenizing.wait()
        return [1, 2, 3]

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        sink: Sink,
        *,
        generated: Sequence[int] = (),
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.generated = tuple(generated)
        self.sinks[request_id] = sink

    def abort(self, request_id: str) -> bool:
        sink = self.sinks.pop(request_id, None)
        if sink is None:
            return False
        self.said.append(("abort", request_id))
        sink.put(Delta(*self.sent, self.held, (), FinishReason.CANCELLED))
        return True

    def pause(self, request_id: str) -> None:
        self.said.append(("pause", request_id))

    def resume(self, request_id: str) -> None:
        self.said.append(("resume", request_id))

    def give(self, text: str, tokens: int, reason: FinishReason | None = None) -> None:
        (index, at), (request_id, sink) = self.sent, next(iter(self.sinks.items()))
        self.sent = (index + tokens, at + len(text))
        if reason is not None:
            del self.sinks[request_id]
        sink.put(Delta(index, at, text, tuple(range(index, index + tokens)), reason))


class Bench:
    def __init__(self, publisher: Publisher, redis: ScriptedRedis) -> None:
        self.engine = ToldEngine()
        self.redis = redis
        self.clock = RedisClock()
        self.publisher = publisher
        self.recovery = Recovery(redis, publisher, redis, Keys("tiny"), worker="w", lease_ms=1000)

    def open(
        self,
        *,
        expires_at_ms: int | None = None,
        max_unsent_tokens: int = 100,
        resumed: bool = False,
        epoch: int = 7,
        estimate: int = 0,
    ) -> Generation:
        claimed = Claimed("a", "token", epoch, 5, 1, b"{}", 12.5, expires_at_ms, resumed, estimate=estimate)
        return Generation(
            claimed,
            model="tiny",
            engine=self.engine,
            publisher=self.publisher,
            recovery=self.recovery,
            clock=self.clock,
            max_unsent_tokens=max_unsent_tokens,
        )

    @asynccontextmanager
    async def running(self, generation: Generation, **asked: Any) -> AsyncIterator[asyncio.Task[Finished]]:
        task = asyncio.create_task(generation.run({"prompt": "hi", **asked}))
        await wait_until(lambda: self.engine.sinks or task.done())
        yield task

    def text(self) -> str:
        return "".join(delta.text for delta in self.redis.deltas("a"))

    def tokens(self) -> list[int]:
        return [token for delta in self.redis.deltas("a") for token in delta.token_ids]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    redis = ScriptedRedis()
    publisher = Publisher(redis)
    bench = Bench(publisher, redis)
    tasks = [asyncio.create_task(publisher.run()), asyncio.create_task(bench.recovery.run())]
    yield bench
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_ends_as_the_engine_says(bench: Bench) -> None:
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("Hel", 2)
        bench.engine.give("lo", 1, FinishReason.LENGTH)
        event = await task
    assert await generation.finish(event) is Outcome.OK
    assert event.finish_reasons == (Reason.LENGTH,)
    assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (3, 3)
    assert event.timings.queue_ms == 12.5
    assert event.timings.total_ms >= event.timings.ttft_ms >= 0
    assert (bench.text(), bench.tokens()) == ("Hello", [0, 1, 2])
    assert bench.redis.deltas("a")[-1].finish_reason is Reason.LENGTH
    assert bench.redis.streams["a"][-1].type == "finished"


async def test_after_a_cancellation_no_further_token_is_published(bench: Bench) -> None:
    """What was sent stands, what was not is dropped, and usage counts what stands."""
    bench.redis.gate = asyncio.Event()
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("sent", 2)
        await wait_until(lambda: bench.redis.calls)
        bench.engine.give("never", 3)
        bench.engine.held = " held"
        generation.cancel()
        generation.cancel()
        event = await task
        bench.redis.gate.set()
        assert await generation.finish(event) is Outcome.OK
    assert event.finish_reasons == (Reason.CANCELLED,)
    assert event.usage.completion_tokens == 2
    assert (bench.text(), bench.tokens()) == ("sent", [0, 1])
    last = bench.redis.deltas("a")[-1]
    assert (last.finish_reason, last.index, last.at, last.token_ids) == (Reason.CANCELLED, 2, 4, ())
    assert bench.engine.said == [("abort", "a")]


async def test_a_cancelled_request_shows_the_text_of_its_published_tokens(bench: Bench) -> None:
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("sent", 3)
        await wait_until(lambda: bench.redis.streams)
        bench.engine.held = " held"
        generation.cancel()
        await generation.finish(await task)
    assert bench.text() == "sent held"


async def test_cancelled_before_it_reaches_the_engine(bench: Bench) -> None:
    bench.engine.tokenizing = asyncio.Event()
    generation = bench.open()
    task = asyncio.create_task(generation.run({"prompt": "hi"}))
    await asyncio.sleep(0)
    generation.cancel()
    bench.engine.tokenizing.set()
    event = await task
    assert event.finish_reasons == (Reason.CANCELLED,)
    assert event.usage.completion_tokens == 0
    assert bench.engine.sinks == {}


async def test_a_deadline_ends_with_all_that_was_generated(bench: Bench) -> None:
    bench.clock.measured(0.0, 0.0, (0, 0))
    generation = bench.open(expires_at_ms=int(bench.clock.now_ms()) + 100)
    async with bench.running(generation) as task:
        bench.engine.give("some", 4)
        bench.engine.held = "!"
        event = await task
        await generation.finish(event)
    assert event.finish_reasons == (Reason.DEADLINE,)
    assert event.usage.completion_tokens == 4
    assert bench.text() == "some!"
    assert bench.redis.deltas("a")[-1].finish_reason is Reason.DEADLINE


async def test_a_plain_jobs_deadline_counts_from_the_claim_on(bench: Bench) -> None:
    generation = bench.open()
    async with bench.running(generation, deadline_ms=50) as task:
        bench.engine.give("some", 4)
        event = await task
        await generation.finish(event)
    assert event.finish_reasons == (Reason.DEADLINE,)
    assert bench.text() == "some"


async def test_a_deadline_that_redis_knows_is_the_only_one(bench: Bench) -> None:
    """It counts from the enqueue on; the payload's own would begin anew with the claim."""
    bench.clock.measured(0.0, 0.0, (0, 0))
    generation = bench.open(expires_at_ms=int(bench.clock.now_ms()) + 60_000)
    async with bench.running(generation, deadline_ms=1) as task:
        bench.engine.give("some", 4)
        await wait_until(lambda: bench.redis.streams)
        bench.engine.give("!", 1, FinishReason.STOP)
        assert (await task).finish_reasons == (Reason.STOP,)


@pytest.mark.parametrize(("model", "served"), [("tiny", True), (None, True), ("another", False)])
async def test_another_models_request_is_refused(bench: Bench, model: str | None, served: bool) -> None:
    task = asyncio.create_task(bench.open().run({"prompt": "hi", "model": model}))
    await wait_until(lambda: bench.engine.sinks or task.done())
    assert bool(bench.engine.sinks) is served
    if not served:
        with pytest.raises(InvalidRequestError, match=r"model: .* queue of 'tiny'"):
            await task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class TestAFullServer:
    async def test_takes_a_natural_end_with_every_token(self, bench: Bench) -> None:
        bench.redis.full = True
        generation = bench.open()
        async with bench.running(generation) as task:
            bench.engine.give("one", 3)
            await wait_until(lambda: bench.redis.calls)
            bench.engine.give("two", 3, FinishReason.LENGTH)
            event = await task
            assert await generation.finish(event) is Outcome.OK
        assert event.usage.completion_tokens == 6
        assert (bench.text(), bench.tokens()) == ("onetwo", list(range(6)))

    async def test_takes_a_cancellation_without_what_it_never_had(self, bench: Bench) -> None:
        generation = bench.open()
        async with bench.running(generation) as task:
            bench.engine.give("one", 3)
            await wait_until(lambda: bench.redis.streams)
            bench.redis.full, before = True, len(bench.redis.calls)
            bench.engine.give("two", 3)
            await wait_until(lambda: len(bench.redis.calls) > before)
            bench.engine.give("three", 5)
            generation.cancel()
            event = await task
            assert await generation.finish(event) is Outcome.OK
        assert event.finish_reasons == (Reason.CANCELLED,)
        assert event.usage.completion_tokens == 3
        assert (bench.text(), bench.tokens()) == ("one", [0, 1, 2])
        assert bench.redis.deltas("a")[-1].finish_reason is Reason.CANCELLED

    async def test_that_stays_full_ends_the_request(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outbox, "REFUSED_SECONDS", 0.05)
        bench.redis.full = True
        generation = bench.open()
        async with bench.running(generation) as task:
            bench.engine.give("one", 3)
            with pytest.raises(ServerFull) as caught:
                await task
            assert await generation.finish(failure(caught.value, 1)) is Outcome.OK
        assert bench.engine.said == [("abort", "a")]
        assert bench.tokens() == [0, 1, 2]
        assert bench.redis.streams["a"][-1].type == "failed"


async def test_a_server_that_refuses_for_long_drops_the_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "REFUSED_SECONDS", 0.05)
    bench.redis.plan = ["misconfigured"] * 1000
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("one", 3)
        with pytest.raises(Dropped, match="refuses to write: MISCONF"):
            await task
    assert bench.engine.said == [("abort", "a")]
    assert await generation.hand_back() is None


@pytest.mark.parametrize("error", [EngineDeadError("x"), RequestFailedError("x")])
async def test_a_failure_of_the_engine_comes_out(bench: Bench, error: Any) -> None:
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("some", 4)
        bench.engine.sinks["a"].fail(error)
        with pytest.raises(type(error)):
            await task
    assert bench.tokens() == [0, 1, 2, 3] or await wait_until(lambda: bench.tokens() == [0, 1, 2, 3])


async def test_a_refusal_comes_out(bench: Bench) -> None:
    bench.engine.refusal = InvalidRequestError("too long")
    with pytest.raises(InvalidRequestError, match="too long"):
        await bench.open().run({"prompt": "hi"})


async def test_a_lost_request_publishes_nothing_more(bench: Bench) -> None:
    bench.redis.gate = asyncio.Event()
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("sent", 2)
        await wait_until(lambda: bench.redis.calls)
        bench.engine.give("never", 3)
        generation.drop("lease lost")
        with pytest.raises(Dropped, match="lease lost"):
            await task
        bench.redis.gate.set()
        await wait_until(lambda: bench.redis.streams)
    assert bench.text() == "sent"
    assert ("abort", "a") in bench.engine.said


async def test_a_request_that_is_somebody_elses_is_dropped(bench: Bench) -> None:
    bench.redis.owners["a"] = "somebody else"
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("x", 1)
        with pytest.raises(Dropped, match="lease lost"):
            await task
    assert bench.redis.streams["a"] == []
    assert ("abort", "a") in bench.engine.said


async def test_a_shutdown_hands_it_back_with_what_was_generated(bench: Bench) -> None:
    """Not with what the engine held back: that depends on what comes next, and nobody knows it yet."""
    bench.engine.held = "half a"
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("some", 4)
        generation.interrupt(ShuttingDown())
        with pytest.raises(ShuttingDown):
            await task
        assert await generation.hand_back() is Outcome.OK
    assert bench.redis.handed_back == ["a"]
    assert bench.text() == "some"
    assert bench.redis.deltas("a")[-1].finish_reason is None


RESUMED = [
    Entry("a", "x", "5-0", "6-0", "started", '{"attempt":1,"worker":"w","resumed_tokens":[0],"queue_ms":1}'),
    Entry("a", "x", "6-0", "6-1", "delta", '{"index":0,"at":0,"text":"Hel","token_ids":[0,1]}'),
    Entry("a", "x", "6-1", "6-2", "delta", '{"index":2,"at":3,"text":"","token_ids":[2]}'),
    Entry("a", "x", "6-2", "7-0", "started", '{"attempt":2,"worker":"w","resumed_tokens":[3],"queue_ms":1}'),
]


async def test_a_resumed_request_goes_on_behind_what_was_published(bench: Bench) -> None:
    bench.redis.streams["a"] = list(RESUMED)
    bench.clock.measured(0.0, 0.0, (0, 0))
    generation = bench.open(resumed=True)
    async with bench.running(generation) as task:
        assert bench.engine.generated == (0, 1, 2)
        bench.engine.sent = (3, 3)
        bench.engine.give("lo", 2, FinishReason.STOP)
        event = await task
        assert await generation.finish(event) is Outcome.OK
    assert (bench.text(), bench.tokens()) == ("Hello", [0, 1, 2, 3, 4])
    assert [entry.entry_id for entry in bench.redis.streams["a"][-2:]] == ["7-1", "7-2"]
    assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (3, 5)
    assert event.timings.ttft_ms is None


async def test_a_resumed_request_that_goes_on_elsewhere_fails_and_shows_no_hole(bench: Bench) -> None:
    """As it would with a worker whose tokenizer is another."""
    bench.redis.streams["a"] = list(RESUMED)
    generation = bench.open(resumed=True)
    async with bench.running(generation):
        bench.engine.sent = (3, 2)
        with pytest.raises(ValueError, match="is next"):
            bench.engine.give("llo", 2)
    assert bench.text() == "Hel"


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "deadline"])
async def test_an_answer_that_was_complete_lacks_its_end_alone(bench: Bench, reason: str) -> None:
    last = Entry(
        "a", "x", "6-2", "6-3", "delta", f'{{"index":3,"at":3,"text":"p","token_ids":[],"finish_reason":"{reason}"}}'
    )
    bench.redis.streams["a"] = [*RESUMED[:-1], last, RESUMED[-1]]
    bench.clock.measured(0.0, 0.0, (0, 0))
    generation = bench.open(resumed=True)
    event = await generation.run({"prompt": "hi"})
    assert await generation.finish(event) is Outcome.OK
    assert bench.engine.sinks == {}
    assert event.finish_reasons == (Reason(reason),)
    assert event.usage.completion_tokens == 3
    assert (bench.text(), [entry.type for entry in bench.redis.streams["a"]][-2:]) == ("Help", ["started", "finished"])


async def test_a_resumed_request_that_is_cancelled_at_once_counts_what_stands(bench: Bench) -> None:
    bench.redis.streams["a"] = list(RESUMED)
    bench.clock.measured(0.0, 0.0, (0, 0))
    bench.engine.tokenizing = asyncio.Event()
    generation = bench.open(resumed=True)
    task = asyncio.create_task(generation.run({"prompt": "hi"}))
    await asyncio.sleep(0)
    generation.cancel()
    bench.engine.tokenizing.set()
    event = await task
    await generation.finish(event)
    assert event.finish_reasons == (Reason.CANCELLED,)
    assert event.usage.completion_tokens == 3
    assert bench.text() == "Hel"


async def test_what_will_be_held_counts_until_the_first_token(bench: Bench) -> None:
    """As the claim took it until there are tokens, whatever the length of its payload."""
    bench.engine.tokenizing = asyncio.Event()
    generation = bench.open(estimate=7000)
    assert generation.uncounted_tokens == 7000
    task = asyncio.create_task(generation.run({"prompt": "hi", "sampling": {"max_tokens": 50}}))
    await asyncio.sleep(0)
    assert generation.uncounted_tokens == 7000
    bench.engine.tokenizing.set()
    await wait_until(lambda: bench.engine.sinks)
    assert generation.uncounted_tokens == 53
    bench.engine.give("x", 1)
    assert generation.uncounted_tokens == 0
    bench.engine.give("x", 1, FinishReason.STOP)
    await task


async def test_a_lease_that_lapsed_is_got_back_while_the_engine_goes_on(bench: Bench) -> None:
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("be", 2)
        await wait_until(lambda: bench.redis.streams)
        bench.redis.lapse("a")
        generation.lose("the lease has lapsed")
        bench.engine.give("fore", 1, FinishReason.STOP)
        assert await generation.finish(await task) is Outcome.OK
    assert bench.text() == "before"
    assert bench.engine.said == []


async def test_the_first_end_counts(bench: Bench) -> None:
    generation = bench.open()
    async with bench.running(generation) as task:
        bench.engine.give("x", 1, FinishReason.STOP)
        generation.cancel()
        generation.interrupt(ShuttingDown())
        assert (await task).finish_reasons == (Reason.STOP,)
    assert bench.engine.said == []


async def test_a_lagging_request_is_paused_and_goes_on(bench: Bench) -> None:
    bench.redis.gate = asyncio.Event()
    generation = bench.open(max_unsent_tokens=4)
    async with bench.running(generation) as task:
        for _ in range(5):
            bench.engine.give("x", 1)
        assert bench.engine.said == [("pause", "a")]
        bench.redis.gate.set()
        await wait_until(lambda: ("resume", "a") in bench.engine.said)
        bench.engine.give("x", 1, FinishReason.STOP)
        await generation.finish(await task)
    assert bench.tokens() == list(range(6))
