"""The engine's process dies, hangs or cannot be had any more, under a worker that serves on."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from support.queue import ENDLESS, KEYS, MODEL, answer_to, left_over, scripted_worker
from support.streams import assert_unbroken, events, starts_of, tokens_of, until_delta, until_ended
from support.waiting import wait_until

from inferq.producer import EngineFailure, InferenceClient

SLOW = ["--step-ms", "10"]


async def test_streams_go_on_when_the_engines_process_is_killed(redis_url: str, client: redis.asyncio.Redis) -> None:
    """In the same attempt and the same epoch: to Redis nothing has happened."""
    async with (
        scripted_worker(redis_url, engine=SLOW) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as c,
    ):
        ids = [await c.submit(f"run {number}", sampling={"max_tokens": 200}) for number in range(4)]
        for request_id in ids:
            await until_delta(client, KEYS, request_id, at_least=5)
        (child,) = worker.family()[1:]
        child.kill()
        for number, request_id in enumerate(ids):
            found = await until_ended(client, KEYS, request_id)
            assert_unbroken(found, answer_to(f"run {number}", 200))
            assert starts_of(found) == [(1, 0)]
        assert worker.process.poll() is None
        assert await left_over(client) == set()


@pytest.mark.slow
async def test_a_step_that_hangs_is_ended(redis_url: str, client: redis.asyncio.Redis) -> None:
    flags = ("--step-timeout-seconds", "1")
    async with (
        scripted_worker(redis_url, *flags, engine=[*SLOW, "--hang-on-text", "medusa"]) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as c,
    ):
        healthy = await c.submit("healthy", sampling={"max_tokens": 300})
        await until_delta(client, KEYS, healthy, at_least=5)
        hanging = await c.submit("look at medusa", sampling={"max_tokens": 5})
        assert (await until_ended(client, KEYS, hanging))[-1].code == "engine_crashed"
        assert_unbroken(await until_ended(client, KEYS, healthy), answer_to("healthy", 300))
        assert worker.process.poll() is None


async def test_a_prompt_that_kills_the_engine_ends_alone(redis_url: str, client: redis.asyncio.Redis) -> None:
    """With a dead letter; who was in the engine with it goes on, and who waits is served."""
    async with (
        scripted_worker(redis_url, engine=[*SLOW, "--exit-on-text", "poison"]) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as c,
    ):
        others = [await c.submit(f"other {number}", sampling={"max_tokens": 200}) for number in range(3)]
        for request_id in others:
            await until_delta(client, KEYS, request_id, at_least=5)
        poison = await c.submit("a poison", sampling={"max_tokens": 5})
        later = await c.submit("later", sampling={"max_tokens": 10})
        with pytest.raises(EngineFailure):
            await c.result(poison)
        found = await until_ended(client, KEYS, poison)
        assert (found[-1].code, tokens_of(found)) == ("engine_crashed", [])
        for number, request_id in enumerate(others):
            assert_unbroken(await until_ended(client, KEYS, request_id), answer_to(f"other {number}", 200))
        assert (await c.result(later)).text == answer_to("later", 10)
        ((_, letter),) = await client.xrange(KEYS.dead)
        assert (letter[b"id"], letter[b"reason"]) == (poison.encode(), b"engine_crashed")
        assert worker.process.poll() is None
        assert await left_over(client) == {KEYS.dead, KEYS.dead_payload(poison)}


async def test_an_engine_that_is_dead_for_good_ends_the_worker_and_hands_its_requests_back(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    """It is not their fault: another worker goes on with them, at no cost."""
    flags = ("--max-engine-restarts", "0")
    async with (
        scripted_worker(redis_url, *flags, engine=[*SLOW, "--exit-after", "30"]) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as c,
    ):
        ids = [await c.submit(f"run {number}", sampling={"max_tokens": 100}) for number in range(3)]
        results = [asyncio.create_task(c.result(request_id)) for request_id in ids]
        assert await worker.wait(30) == 1
        assert await client.zcard(KEYS.workers) == 0
        assert await client.zcard(KEYS.queue) == 3
        async with scripted_worker(redis_url):
            for number, (request_id, result) in enumerate(zip(ids, results, strict=True)):
                assert (await result).text == answer_to(f"run {number}", 100)
                found = await events(client, KEYS, request_id)
                assert_unbroken(found, answer_to(f"run {number}", 100))
                assert {attempt for attempt, _ in starts_of(found)} == {1}
        assert await left_over(client) == set()


@pytest.mark.slow
async def test_while_the_engine_starts_again_jobs_go_to_others(redis_url: str, client: redis.asyncio.Redis) -> None:
    """A claim by a worker without an engine would keep them from a worker with one."""
    async with (
        scripted_worker(redis_url, engine=["--load-ms", "3000"]) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as c,
    ):
        running = await c.submit("run", sampling=ENDLESS)
        await until_delta(client, KEYS, running)
        (child,) = worker.family()[1:]
        child.kill()
        await wait_until(lambda: "engine_died" in worker.log)
        async with scripted_worker(redis_url, "--worker-id", "other"):
            request_id = await c.submit("other", sampling={"max_tokens": 5})
            found = await until_ended(client, KEYS, request_id)
            assert [event.worker for event in found if event.type == "started"] == ["other"]
        await c.cancel(running)
        await until_ended(client, KEYS, running)
