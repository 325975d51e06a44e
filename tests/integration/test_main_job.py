"""The main job from end to end: a real client, a real server, a real worker, a real engine child, a real model."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest
from support.processes import SCRIPTED_ENGINE, all_gone, start_worker
from support.servers import valkey
from support.waiting import wait_until

from inferq.engine import AsyncInferenceEngine, EngineConfig, SamplingParams
from inferq.producer import CancelOutcome, Delta, Failed, Finished, InferenceClient, Queued, RequestRefused, Started

from .conftest import MODEL, RealWorker

GREEDY = {"temperature": 0.0, "max_tokens": 16}
ENDLESS = {"temperature": 0.0, "max_tokens": 4000, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
#: Over two steps' token budget, so that its prefill takes several steps.
LONG_PROMPT = "The river ran past the mill and on to the sea. " * 550


def text_of(events: list) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def tokens_of(events: list) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


async def read(client: InferenceClient, request_id: str) -> list:
    return [event async for event in client.stream(request_id)]


async def first_delta(client: InferenceClient, request_id: str) -> None:
    async with client.stream(request_id) as events:
        async for event in events:
            if isinstance(event, Delta):
                return
    raise AssertionError("the stream ended without a delta")


async def test_one_answer_streams_and_adds_up(real_worker: RealWorker) -> None:
    async with real_worker.client() as client:
        request_id = await client.submit(messages=QUESTION, sampling=GREEDY)
        events = await read(client, request_id)
        result = await client.result(request_id)
    assert isinstance(events[0], Queued)
    assert isinstance(events[1], Started)
    assert isinstance(events[-1], Finished)
    assert len([event for event in events if isinstance(event, Delta)]) > 3, "the answer came in one piece"
    assert "Paris" in text_of(events)
    assert result.text == text_of(events)
    assert list(result.token_ids) == tokens_of(events)
    assert result.usage.completion_tokens == len(result.token_ids)


async def test_two_readers_and_a_late_one_get_all_of_it(real_worker: RealWorker) -> None:
    async with real_worker.client() as client, real_worker.client() as other:
        request_id = await client.submit(messages=QUESTION, sampling=GREEDY)
        one, two = await asyncio.gather(read(client, request_id), read(other, request_id))
        late = await read(other, request_id)
    assert one == two == late


async def test_a_stream_goes_on_from_any_position(real_worker: RealWorker) -> None:
    async with real_worker.client() as client:
        request_id = await client.submit(messages=QUESTION, sampling=GREEDY)
        seen, positions = [], ["0"]
        async with client.stream(request_id) as events:
            async for event in events:
                seen.append(event)
                positions.append(events.position)
        for number, position in enumerate(positions):
            rest = [event async for event in client.stream(request_id, position=position)]
            assert text_of(seen[:number]) + text_of(rest) == text_of(seen)
            assert tokens_of(seen[:number]) + tokens_of(rest) == tokens_of(seen)


async def test_cancel_while_running_keeps_the_partial_text(real_worker: RealWorker) -> None:
    async with real_worker.client() as client:
        request_id = await client.submit(messages=QUESTION, sampling=ENDLESS)
        await first_delta(client, request_id)
        assert await client.cancel(request_id) is CancelOutcome.REQUESTED
        events = await read(client, request_id)
        assert isinstance(events[-1], Finished)
        assert events[-1].finish_reasons == ("cancelled",)
        assert text_of(events)
        assert events[-1].usage.completion_tokens == len(tokens_of(events)) < ENDLESS["max_tokens"]
        assert await client.cancel(request_id) is CancelOutcome.FINISHED
        await real_worker.until_idle()


@pytest.mark.slow
async def test_cancel_in_prefill_ends_with_no_tokens(real_worker: RealWorker) -> None:
    async def prefilling() -> bool:
        return (await real_worker.heartbeat())["stats"]["used_blocks"] > 100

    async with real_worker.client() as client:
        # Beside one that decodes, so that the child's counters are heard while the long prompt is still prefilled.
        beside = await client.submit("Once upon a time", sampling=ENDLESS)
        await first_delta(client, beside)
        request_id = await client.submit(LONG_PROMPT, sampling=ENDLESS | {"max_tokens": 500})
        await wait_until(prefilling, what="the long prompt holds blocks")
        await client.cancel(request_id)
        events = await read(client, request_id)
        assert events[-1].finish_reasons == ("cancelled",)
        assert not tokens_of(events)
        await client.cancel(beside)
        assert tokens_of(await read(client, beside))
        await real_worker.until_idle()


async def test_cancel_while_queued_ends_at_once(real_worker: RealWorker) -> None:
    async with real_worker.client() as client:
        slots = (await real_worker.heartbeat())["slots"]
        running = await asyncio.gather(
            *(client.submit("Once upon a time", sampling=ENDLESS) for _ in range(slots)),
        )
        await asyncio.gather(*(first_delta(client, request_id) for request_id in running))
        waiting = await client.submit(messages=QUESTION, sampling=GREEDY)
        assert (await client.status(waiting)).position == 0
        assert await client.cancel(waiting) is CancelOutcome.CANCELLED
        events = await read(client, waiting)
        assert [type(event) for event in events] == [Queued, Finished]
        assert events[-1].finish_reasons == ("cancelled",)
        await asyncio.gather(*(client.cancel(request_id) for request_id in running))
        for request_id in running:
            assert (await read(client, request_id))[-1].finish_reasons == ("cancelled",)
        await real_worker.until_idle()


async def test_a_bad_request_hurts_no_neighbour(real_worker: RealWorker) -> None:
    async with real_worker.client() as client:
        alone = await client.result(await client.submit(messages=QUESTION, sampling=GREEDY))
        good = await client.submit(messages=QUESTION, sampling=GREEDY)
        bad = await client.submit("word " * 9000, sampling=GREEDY)
        roles = await client.submit(messages=[{"role": "user", "content": "hi"}], sampling={"max_tokens": 8190})
        assert (await client.result(good)).text == alone.text
        for request_id, limit in ((bad, "8192"), (roles, "8192")):
            with pytest.raises(RequestRefused, match=limit):
                await client.result(request_id)
            assert isinstance((await read(client, request_id))[-1], Failed)
        assert (await client.result(await client.submit(messages=QUESTION, sampling=GREEDY))).text == alone.text
        await real_worker.until_idle()


PROMPTS = [f"{start} {number}" for number in range(16) for start in ("One day", "The number", "In the year", "List:")]


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """The engine's own texts for PROMPTS, one at a time, in fp32."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8)

    async def run() -> dict[str, str]:
        engine = AsyncInferenceEngine(EngineConfig(model="demo", dtype="float32", max_model_len=8192, max_num_seqs=64))
        await engine.start_engine_loop()
        try:
            return {prompt: (await engine.complete(prompt, sampling=sampling)).text for prompt in PROMPTS}
        finally:
            await engine.stop()

    return asyncio.run(run())


@pytest.mark.timeout(300)
async def test_64_at_once_equal_one_at_a_time(real_worker: RealWorker, alone: dict[str, str]) -> None:
    async with real_worker.client() as client:
        sampling = {"temperature": 0.0, "max_tokens": 8}
        ids = await asyncio.gather(*(client.submit(prompt, sampling=sampling) for prompt in PROMPTS))
        results = await asyncio.gather(*(client.result(request_id) for request_id in ids))
    assert len(results) == 64
    assert {prompt: result.text for prompt, result in zip(PROMPTS, results, strict=True)} == alone
    beat = await real_worker.until_idle()
    assert beat["stats"]["free_blocks"] > 0


async def test_sampling_with_a_seed_is_the_same_alone_and_in_company(real_worker: RealWorker) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 42, "max_tokens": 12}
    async with real_worker.client() as client:
        solo = await client.result(await client.submit(messages=QUESTION, sampling=sampled))
        ids = await asyncio.gather(
            client.submit(messages=QUESTION, sampling=sampled),
            *(client.submit("A tale:", sampling={"max_tokens": 12, "seed": n}) for n in range(6)),
        )
        together = [await client.result(request_id) for request_id in ids]
    assert together[0].token_ids == solo.token_ids
    assert len({result.token_ids for result in together[1:]}) > 1, "different seeds chose the same tokens"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_clean_shutdown_and_kill_leave_nothing_behind() -> None:
    flags = ("--model", "demo", "--served-model-name", MODEL, "--dtype", "float32")
    with valkey() as url:
        with start_worker(url, *flags) as worker:
            await worker.until_ready(MODEL)
            family = worker.family()
            assert len(family) >= 2, "the engine runs in a process of its own"
            async with InferenceClient.from_url(url, model=MODEL) as client:
                request_id = await client.submit(messages=QUESTION, sampling=GREEDY)
                await first_delta(client, request_id)
                worker.send(signal.SIGTERM)
                assert "Paris" in (await client.result(request_id)).text, "what ran is finished during the drain"
            assert await worker.wait() == 0
            await all_gone(family)
        with start_worker(url, *flags) as worker:
            await worker.until_ready(MODEL)
            family = worker.family()
            worker.send(signal.SIGKILL)
            await worker.wait()
            await all_gone(family)


async def test_abort_frees_blocks_before_the_next_planned_step() -> None:
    """By the child's own counters: no step ran with the request after the one in which the abort came.

    A step takes long enough here that the abort surely comes in the middle of one, and before its end.
    """
    command = [sys.executable, str(SCRIPTED_ENGINE), "--step-ms", "300"]
    async with AsyncInferenceEngine(EngineConfig(model="demo", max_num_seqs=4), command=command) as engine:
        stream = await engine.add_request("long", "Once upon a time", sampling=SamplingParams(**ENDLESS_ENGINE))
        pieces = [await anext(stream) for _ in range(3)]
        before = engine.stats
        assert before is not None
        assert before.used_blocks > 0
        freed = engine.freed("long")
        assert engine.abort("long")
        pieces += [piece async for piece in stream]
        stats = await freed
        assert stats is not None
        assert stats.used_blocks == 0
        assert stats.step <= before.step + 1, "a step that was planned after the abort ran with the request"
        assert pieces[-1].finish_reason == "cancelled"
        assert "".join(piece.text for piece in pieces)
        assert engine.idle


async def test_the_real_engine_frees_an_aborted_request() -> None:
    config = EngineConfig(model="demo", dtype="float32", max_model_len=2048, max_num_seqs=4)
    async with AsyncInferenceEngine(config) as engine:
        stream = await engine.add_request("long", "Once upon a time", sampling=SamplingParams(**ENDLESS_ENGINE))
        neighbour = await engine.add_request("short", "The sea", sampling=SamplingParams(temperature=0, max_tokens=8))
        await anext(stream)
        freed = engine.freed("long")
        assert engine.abort("long")
        stats = await freed
        assert stats is not None
        assert (await neighbour.collect()).finish_reason == "length"
        await wait_until(lambda: engine.stats is not None and engine.stats.used_blocks == 0 and engine.idle)


ENDLESS_ENGINE = {"temperature": 0.0, "max_tokens": 1000, "ignore_eos": True}
