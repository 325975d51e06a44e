"""Cancellation at every moment of a job's life, by the client and by the bare key."""

from __future__ import annotations

import redis.asyncio
from support.queue import ENDLESS, KEYS, MODEL, answer_to, left_over, scripted_worker
from support.streams import events, text_of, tokens_of, until_delta, until_ended
from support.waiting import wait_until

from inferq.producer import CancelOutcome, InferenceClient

SLOW = ["--step-ms", "5"]


async def test_a_running_request_ends_with_its_partial_text(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with scripted_worker(redis_url, engine=SLOW), InferenceClient.from_url(redis_url, model=MODEL) as producer:
        request_id = await producer.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, request_id, at_least=3)
        assert await producer.cancel(request_id) is CancelOutcome.REQUESTED
        found = await until_ended(client, KEYS, request_id)
        assert found[-1].finish_reasons == ("cancelled",)
        tokens = tokens_of(found)
        assert 3 <= len(tokens) == found[-1].usage.completion_tokens < ENDLESS["max_tokens"]
        assert text_of(found) == answer_to("run", len(tokens))
        assert found[-2].finish_reason == "cancelled"
        assert await producer.cancel(request_id) is CancelOutcome.FINISHED
        assert await left_over(client) == set()


async def test_a_request_whose_readers_have_gone_is_cancelled_where_that_was_asked_for(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    flags = ("--lease-seconds", "0.6")
    async with (
        scripted_worker(redis_url, *flags, engine=SLOW),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        kept = await producer.submit("kept", sampling=ENDLESS)
        request_id = await producer.submit("left", sampling=ENDLESS, cancel_on_disconnect=True)
        for each in (kept, request_id):
            async for event in producer.stream(each):
                if event.type == "delta":
                    break
        # The reader has said that it is there; now its word has run out, which takes 30 s by itself.
        await wait_until(lambda: client.exists(KEYS.reader(request_id)))
        await client.delete(KEYS.reader(request_id))
        found = await until_ended(client, KEYS, request_id)
        assert found[-1].finish_reasons == ("cancelled",)
        assert (await events(client, KEYS, kept))[-1].type == "delta"
        await producer.cancel(kept)


async def test_with_every_slot_busy_a_running_request_can_be_cancelled(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    """One slot, one endless job: the cancellation reaches it, and the waiting job gets the slot."""
    async with (
        scripted_worker(redis_url, "--max-num-seqs", "1", engine=SLOW),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        running = await producer.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, running)
        waiting = await producer.submit("wait", sampling={"max_tokens": 3})
        await producer.cancel(running)
        assert (await until_ended(client, KEYS, running, timeout=10))[-1].finish_reasons == ("cancelled",)
        assert text_of(await until_ended(client, KEYS, waiting)) == answer_to("wait", 3)


async def test_a_waiting_job_ends_at_once_without_a_worker_touching_it(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    async with (
        scripted_worker(redis_url, "--max-num-seqs", "1", engine=SLOW),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        running = await producer.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, running)
        waiting = await producer.submit("wait", sampling=ENDLESS)
        assert await producer.cancel(waiting) is CancelOutcome.CANCELLED
        assert [event.type for event in await events(client, KEYS, waiting)] == ["queued", "finished"]
        await producer.cancel(running)
        await until_ended(client, KEYS, running)


async def test_a_key_that_stood_before_the_worker_started_is_heeded(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    async with InferenceClient.from_url(redis_url, model=MODEL) as producer:
        request_id = await producer.submit("never", sampling=ENDLESS)
        generation = await client.hget(KEYS.job(request_id), "generation")
        await client.set(KEYS.cancel(request_id), generation, px=60_000)
        async with scripted_worker(redis_url):
            found = await until_ended(client, KEYS, request_id)
    assert [event.type for event in found] == ["queued", "finished"]
    assert found[-1].finish_reasons == ("cancelled",)


async def test_a_key_without_its_doorbell_is_found_by_the_next_renewal(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    async with (
        scripted_worker(redis_url, "--lease-seconds", "1", engine=SLOW),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        request_id = await producer.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, request_id)
        generation = await client.hget(KEYS.job(request_id), "generation")
        await client.set(KEYS.cancel(request_id), generation, px=60_000)
        assert (await until_ended(client, KEYS, request_id))[-1].finish_reasons == ("cancelled",)


async def test_a_cancellation_never_hits_a_later_job_of_the_same_id(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    async with scripted_worker(redis_url, engine=SLOW), InferenceClient.from_url(redis_url, model=MODEL) as producer:
        assert await producer.cancel("x") is CancelOutcome.UNKNOWN
        await producer.submit("first", request_id="x", sampling={"max_tokens": 3})
        assert text_of(await until_ended(client, KEYS, "x")) == answer_to("first", 3)
        await producer.cancel("x")
        for number in range(20):
            await producer.submit(f"again {number}", request_id="x", sampling=ENDLESS)
            await until_delta(client, KEYS, "x")
            await producer.cancel("x")
            assert (await until_ended(client, KEYS, "x"))[-1].finish_reasons == ("cancelled",)
            await producer.submit(f"short {number}", request_id="x", sampling={"max_tokens": 2})
            assert text_of(await until_ended(client, KEYS, "x")) == answer_to(f"short {number}", 2)


async def test_a_doorbell_for_nobody_or_of_garbage_is_no_harm(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with scripted_worker(redis_url, engine=SLOW), InferenceClient.from_url(redis_url, model=MODEL) as producer:
        request_id = await producer.submit("run", sampling={"max_tokens": 50})
        await until_delta(client, KEYS, request_id)
        for message in (b"unknown", b"\xff\xfe", request_id.encode()):
            assert await client.publish(KEYS.control, message) == 1
        assert text_of(await until_ended(client, KEYS, request_id)) == answer_to("run", 50)


async def test_a_subscription_that_was_killed_comes_back(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with scripted_worker(redis_url, engine=SLOW), InferenceClient.from_url(redis_url, model=MODEL) as producer:
        await wait_until(lambda: _listeners(client))
        await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await wait_until(lambda: _listeners(client), what="the worker has subscribed again")
        request_id = await producer.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, request_id)
        await producer.cancel(request_id)
        assert (await until_ended(client, KEYS, request_id))[-1].finish_reasons == ("cancelled",)


async def _listeners(client: redis.asyncio.Redis) -> bool:
    return dict(await client.pubsub_numsub(KEYS.control))[KEYS.control.encode()] == 1


async def test_a_deadline_passes_while_waiting_and_while_running(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with (
        scripted_worker(redis_url, "--max-num-seqs", "1", engine=SLOW),
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        running = await producer.submit("run", sampling=ENDLESS, deadline_ms=700)
        await until_delta(client, KEYS, running)
        waiting = await producer.submit("wait", sampling=ENDLESS, deadline_ms=100)
        found = await until_ended(client, KEYS, waiting)
        assert [event.type for event in found] == ["queued", "finished"]
        assert found[-1].finish_reasons == ("deadline",)
        found = await until_ended(client, KEYS, running)
        assert found[-1].finish_reasons == ("deadline",)
        assert found[-1].usage.completion_tokens == len(tokens_of(found)) > 0
