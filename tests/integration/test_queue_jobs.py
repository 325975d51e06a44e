"""Jobs through a real queue to a real worker with a scripted engine: good ones, foreign ones, broken ones."""

from __future__ import annotations

import asyncio
import json
import pickle
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from support.queue import ENDLESS, KEYS, MODEL, answer_to, arq_payload, left_over, put_plain, scripted_worker
from support.streams import text_of, until_ended
from support.waiting import wait_until

from inferq.producer import EngineFailure, InferenceClient, RequestRefused, connect
from inferq.producer.requests import MAX_PROMPT_CHARS


async def test_a_job_is_answered_and_leaves_nothing_behind(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with scripted_worker(redis_url), InferenceClient.from_url(redis_url, model=MODEL) as producer:
        request_id = await producer.submit("Once upon", sampling={"max_tokens": 24})
        events = await until_ended(client, KEYS, request_id)
        assert [event.type for event in events][:2] == ["queued", "started"]
        assert text_of(events) == answer_to("Once upon", 24)
        assert events[-1].finish_reasons == ("length",)
        assert events[-1].usage.completion_tokens == 24
        assert events[-1].timings.queue_ms >= 0
        assert await left_over(client) == set()


async def test_a_plain_arq_producer_is_served(redis_url: str, client: redis.asyncio.Redis) -> None:
    arq = connect(redis_url)
    async with scripted_worker(redis_url):
        request = {"prompt": "plain", "sampling": {"max_tokens": 5}}
        job = await arq.enqueue_job("generate", request, _queue_name=KEYS.queue)
        assert job is not None
        events = await until_ended(client, KEYS, job.job_id)
    await arq.aclose()
    assert [event.type for event in events][:2] == ["queued", "started"]
    assert text_of(events) == answer_to("plain", 5)


async def test_plain_jobs_can_be_refused(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with scripted_worker(redis_url, "--no-accept-plain-jobs", "--poll-seconds", "0.1"):
        request_id = await put_plain(client, arq_payload(args=[{"prompt": "plain"}]))
        events = await until_ended(client, KEYS, request_id)
    assert events[-1].code == "bad_payload"
    assert "plain arq producers" in events[-1].message


async def test_a_plain_jobs_deadline_counts_and_its_model_must_be_ours(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    request = {"prompt": "plain", "sampling": ENDLESS}
    async with scripted_worker(redis_url, engine=["--step-ms", "10"]):
        late = await put_plain(client, arq_payload(args=[{**request, "deadline_ms": 300}]))
        other = await put_plain(client, arq_payload(args=[{**request, "model": "another"}]))
        same = await put_plain(client, arq_payload(args=[{**request, "model": MODEL, "sampling": {"max_tokens": 3}}]))
        events = await until_ended(client, KEYS, late)
        assert events[-1].finish_reasons == ("deadline",)
        assert text_of(events) == answer_to("plain", events[-1].usage.completion_tokens)
        refused = (await until_ended(client, KEYS, other))[-1]
        assert (refused.code, "another model" in refused.message) == ("invalid_request", True)
        assert (await until_ended(client, KEYS, same))[-1].finish_reasons == ("length",)


async def test_a_hostile_payload_costs_its_neighbours_nothing(redis_url: str, client: redis.asyncio.Redis) -> None:
    """Decoded, it would hold the interpreter for seconds, and the leases of everybody with it."""
    lists = b'{"t":null,"f":"generate","a":[{"prompt":"x","junk":[' + b"[]," * 2_500_000 + b'1]}],"k":{},"et":1}'
    ids = b'{"t":null,"f":"generate","a":[{"prompt_token_ids":[' + b"-1," * 1_000_000 + b'1]}],"k":{},"et":1}'
    async with (
        scripted_worker(redis_url, "--lease-seconds", "1", engine=["--step-ms", "5"]),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        neighbours = [await producer.submit(f"n{n}", sampling={"max_tokens": 400}) for n in range(4)]
        hostile = [await put_plain(client, payload) for payload in (lists, ids, lists)]
        for request_id in hostile:
            failed = (await until_ended(client, KEYS, request_id))[-1]
            assert (failed.code, "values" in failed.message) == ("bad_payload", True)
        for number, request_id in enumerate(neighbours):
            assert (await producer.result(request_id)).text == answer_to(f"n{number}", 400)


class Touch:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


async def test_what_is_no_job_of_ours_fails_with_a_reason_and_hurts_nobody(
    redis_url: str, client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    later = {"t": None, "f": "generate", "a": [{"prompt": "hi", "new_field": 1}], "k": {}, "et": 1}
    payloads = {
        "garbage": b"\x00\xff not json",
        "no-object": b"[]",
        "pickle": pickle.dumps({"t": None, "f": "generate", "a": [Touch(marker)], "k": {}, "et": 1}),
        "bare-pickle": pickle.dumps(Touch(marker)),
        "other-function": arq_payload("send_mail", [{"prompt": "hi"}]),
        "no-argument": arq_payload(),
        "keywords": arq_payload(args=[{"prompt": "hi"}], kwargs={"queue": "x"}),
        "unknown-field": json.dumps(later).encode(),
        "no-prompt": arq_payload(args=[{}]),
        "bad-sampling": arq_payload(args=[{"prompt": "hi", "sampling": {"temperature": -1}}]),
    }
    async with scripted_worker(redis_url), InferenceClient.from_url(redis_url, model=MODEL) as producer:
        for request_id, payload in payloads.items():
            await put_plain(client, payload, request_id)
        for request_id in payloads:
            events = await until_ended(client, KEYS, request_id)
            assert (request_id, events[-1].code) == (request_id, "bad_payload")
            with pytest.raises(RequestRefused):
                await producer.result(request_id)
        good = await producer.submit("good", sampling={"max_tokens": 4})
        assert (await producer.result(good)).text == answer_to("good", 4)
        assert await left_over(client) == set()
    assert not marker.exists()


async def test_what_only_the_worker_can_judge_is_refused_by_name(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with (
        scripted_worker(redis_url, "--max-model-len", "64"),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        for prompt in ("x" * 64, "x" * MAX_PROMPT_CHARS):
            request_id = await producer.submit(prompt, sampling={"max_tokens": 1})
            events = await until_ended(client, KEYS, request_id)
            assert events[-1].code == "invalid_request"
            assert "max_model_len" in events[-1].message
            assert "64" in events[-1].message
        fits = await producer.submit("x" * 63, sampling={"max_tokens": 1})
        assert (await producer.result(fits)).finish_reason == "length"


async def test_a_prompt_over_the_context_is_refused_while_others_run(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    """Also where it looks as if the whole engine would be needed for it: nobody waits for an empty worker."""
    huge = "x" * 8000
    flags = ("--max-model-len", "1000", "--poll-seconds", "0.1")
    async with (
        scripted_worker(redis_url, *flags, engine=["--step-ms", "50", "--blocks", "70"]),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        running = await producer.submit("running", sampling={"max_tokens": 900})
        await wait_until(lambda: _count_running(client, 1))
        plain = await put_plain(client, arq_payload(args=[{"prompt": huge, "sampling": {"max_tokens": 1}}]))
        ours = await producer.submit(huge, sampling={"max_tokens": 1})
        behind = await producer.submit("behind", sampling={"max_tokens": 3})
        for request_id in (plain, ours):
            refused = (await until_ended(client, KEYS, request_id))[-1]
            assert (refused.code, "max_model_len" in refused.message) == ("invalid_request", True)
        assert (await producer.result(behind)).text == answer_to("behind", 3)
        assert (await producer.status(running)).state == "running"
        await producer.cancel(running)
        assert (await producer.result(running)).finish_reason == "cancelled"


async def test_what_fits_and_seems_too_large_is_not_taken_all_at_once(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    """Four times 350 tokens, for each of which the estimate says 1025; there are 1000 places."""
    flags = ("--max-model-len", "1000", "--max-num-seqs", "8")
    async with InferenceClient.from_url(redis_url, model=MODEL) as producer:
        sampling = {"max_tokens": 50, "ignore_eos": True}
        ids = [await producer.submit("<|endoftext|>" * 300, sampling=sampling) for _ in range(4)]
        epochs = set()
        async with scripted_worker(
            redis_url, *flags, engine=["--step-ms", "1", "--blocks", "32", "--block-size", "32"]
        ):
            for request_id in ids:
                assert (await producer.result(request_id)).usage.prompt_tokens == 300
                entries = await client.xrange(KEYS.events(request_id))
                epochs |= {entry_id.split(b"-")[0] for entry_id, fields in entries if fields[b"t"] == b"started"}
    assert len(epochs) == 4, "what one claim takes is started at one moment"


async def test_a_failure_inside_the_engine_ends_that_request_alone(redis_url: str) -> None:
    async with (
        scripted_worker(redis_url, engine=["--refuse-text", "forbidden"]),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        bad = await producer.submit("forbidden word", sampling={"max_tokens": 4})
        good = await producer.submit("allowed word", sampling={"max_tokens": 4})
        with pytest.raises(RequestRefused, match="told to refuse"):
            await producer.result(bad)
        assert (await producer.result(good)).text == answer_to("allowed word", 4)


async def test_200_quick_jobs_and_three_workers_end_once_each(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with AsyncExitStack() as stack:
        for number in range(3):
            flags = ("--worker-id", f"w{number}", "--max-num-seqs", "16", "--heartbeat-seconds", "0.2")
            await stack.enter_async_context(scripted_worker(redis_url, *flags, engine=["--step-ms", "1"]))
        await wait_until(lambda: _all_listed(client, 3))
        producer = await stack.enter_async_context(InferenceClient.from_url(redis_url, model=MODEL))
        prompts = [f"job {number}" for number in range(200)]
        ids = await asyncio.gather(*(producer.submit(prompt, sampling={"max_tokens": 2}) for prompt in prompts))
        starters: set[str] = set()
        for request_id, prompt in zip(ids, prompts, strict=True):
            events = await until_ended(client, KEYS, request_id)
            assert text_of(events) == answer_to(prompt, 2)
            started = [event for event in events if event.type == "started"]
            assert len(started) == 1
            starters.add(started[0].worker)
        assert len(starters) > 1
        assert await left_over(client) == set()


async def _all_listed(client: redis.asyncio.Redis, count: int) -> bool:
    return await client.zcard(KEYS.workers) == count


async def test_a_full_engine_leaves_jobs_to_others_until_a_slot_is_free(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    flags = ("--max-num-seqs", "2", "--poll-seconds", "60", "--no-accept-plain-jobs")
    async with (
        scripted_worker(redis_url, *flags, engine=["--step-ms", "5"]),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        ids = [await producer.submit(f"job {n}", sampling={"max_tokens": 20}) for n in range(6)]
        await wait_until(lambda: _count_running(client, 2))
        assert await client.zcard(KEYS.queue) == 4
        # The poll is a minute off: only the bell and free slots bring the rest in.
        for request_id in ids:
            assert (await producer.result(request_id, timeout=20)).finish_reason == "length"


async def _count_running(client: redis.asyncio.Redis, count: int) -> bool:
    return await client.zcard(KEYS.running) == count


async def test_an_engine_that_raises_fails_what_it_had(redis_url: str) -> None:
    async with (
        scripted_worker(redis_url, engine=["--exit-on-text", "poison"]),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        with pytest.raises(EngineFailure, match="engine_crashed"):
            await producer.result(await producer.submit("poison", sampling={"max_tokens": 4}))
