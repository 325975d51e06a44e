"""A worker is gone, or was away: another one goes on where its streams stop, and nobody who reads sees a seam."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack

import psutil
import pytest
import redis.asyncio
from support.processes import WorkerProcess
from support.queue import ENDLESS, KEYS, MODEL, answer_to, left_over, scripted_worker
from support.streams import assert_unbroken, events, starts_of, text_of, until_delta, until_ended
from support.waiting import wait_until

from inferq.producer import InferenceClient, RequestFailed

SLOW = ["--step-ms", "10"]
SHORT = ("--lease-seconds", "1")


async def test_a_stream_goes_on_when_its_worker_is_killed(redis_url: str, client: redis.asyncio.Redis) -> None:
    """One text, one end, and the tokens that were there are not generated again."""
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as c,
        scripted_worker(redis_url, *SHORT, engine=SLOW) as a,
        scripted_worker(redis_url, *SHORT, engine=SLOW) as b,
    ):
        ids = [await c.submit(f"lost {number}", sampling={"max_tokens": 300}) for number in range(6)]
        results = [asyncio.create_task(c.result(request_id)) for request_id in ids]
        for request_id in ids:
            await until_delta(client, KEYS, request_id, at_least=20)
        killed = await _owner(client, ids[0], [a, b])
        killed.send(signal.SIGKILL)
        for number, (request_id, result) in enumerate(zip(ids, results, strict=True)):
            found = await until_ended(client, KEYS, request_id)
            assert_unbroken(found, answer_to(f"lost {number}", 300))
            assert (await result).text == answer_to(f"lost {number}", 300)
            assert found[-1].finish_reasons == ("length",)
            assert found[-1].usage.completion_tokens == 300
            (first, *rest) = starts_of(found)
            assert first == (1, 0)
            assert all(attempt in (1, 2) and resumed >= 20 for attempt, resumed in rest)
        assert len(starts_of(await events(client, KEYS, ids[0]))) == 2
        assert await left_over(client) == set()


async def _owner(client: redis.asyncio.Redis, request_id: str, workers: list[WorkerProcess]) -> WorkerProcess:
    """Who runs it, by the worker's id, which has its process id in it."""
    (started,) = [event for event in await events(client, KEYS, request_id) if event.type == "started"]
    (owner,) = [worker for worker in workers if f"-{worker.pid}-" in started.worker]
    return owner


@pytest.mark.slow
async def test_an_expired_lease_goes_before_what_waits(redis_url: str, client: redis.asyncio.Redis) -> None:
    """Also where every slot is taken: the next one that comes free is for it."""
    flags = (*SHORT, "--max-num-seqs", "1")
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as c,
        scripted_worker(redis_url, *flags, engine=SLOW) as a,
    ):
        lost = await c.submit("lost", sampling={"max_tokens": 200})
        await until_delta(client, KEYS, lost)
        async with scripted_worker(redis_url, *flags, engine=SLOW):
            busy = await c.submit("busy", sampling=ENDLESS)
            await until_delta(client, KEYS, busy)
            waiting = await c.submit("wait", sampling={"max_tokens": 5})
            a.send(signal.SIGKILL)
            await wait_until(lambda: _has_lapsed(client, lost))
            await c.cancel(busy)
            found = await until_ended(client, KEYS, waiting)
            before = await until_ended(client, KEYS, lost)
            assert_unbroken(before, answer_to("lost", 200))
            assert _started_ms(before, -1) < _started_ms(found, 0)


async def _has_lapsed(client: redis.asyncio.Redis, request_id: str) -> bool:
    return not await client.exists(KEYS.lease(request_id))


def _started_ms(found: list, number: int) -> float:
    """When a job's claim was: its enqueue by Redis' clock, and the time in the queue."""
    started = [event for event in found if event.type == "started"][number]
    return found[0].enqueued_at_ms + started.queue_ms


@pytest.mark.slow
async def test_with_its_last_attempt_a_job_ends_as_a_dead_letter(redis_url: str, client: redis.asyncio.Redis) -> None:
    flags = (*SHORT, "--max-attempts", "1")
    async with InferenceClient.from_url(redis_url, model=MODEL) as c, AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker(redis_url, *flags, engine=SLOW)) for _ in range(2)]
        # Both have had Redis for longer than a lease: from here on a lost lease is a lost worker.
        await wait_until(lambda: _beats(client))
        request_id = await c.submit("lost", sampling=ENDLESS)
        await until_delta(client, KEYS, request_id)
        (await _owner(client, request_id, workers)).send(signal.SIGKILL)
        found = await until_ended(client, KEYS, request_id)
        assert (found[-1].code, found[-1].attempts) == ("attempts_exhausted", 1)
        with pytest.raises(RequestFailed):
            await c.result(request_id)
        ((_, letter),) = await client.xrange(KEYS.dead)
        assert (letter[b"id"], letter[b"reason"]) == (request_id.encode(), b"attempts_exhausted")
        assert await client.pttl(KEYS.dead_payload(request_id)) > 6 * 24 * 3600 * 1000


async def _beats(client: redis.asyncio.Redis) -> bool:
    """Whether every worker has been there for more than the lease of these tests."""
    seconds, _ = await client.time()
    states = [json.loads(await client.get(key) or "{}") async for key in client.scan_iter("inferq:worker:*")]
    return len(states) == 2 and all(
        seconds * 1000 - state.get("started_at_ms", seconds * 1000) > 2500 for state in states
    )


@pytest.mark.parametrize("with_child", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_stalled_worker_that_wakes_up_changes_nothing(
    redis_url: str, client: redis.asyncio.Redis, with_child: bool
) -> None:
    """The worker alone, so that its engine goes on into a full pipe; or both."""
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as c,
        scripted_worker(redis_url, *SHORT, engine=SLOW) as a,
    ):
        request_id = await c.submit("stall", sampling={"max_tokens": 400})
        await until_delta(client, KEYS, request_id, at_least=10)
        stalled = [psutil.Process(a.pid), *(a.family()[1:] if with_child else [])]
        for process in stalled:
            process.suspend()
        async with scripted_worker(redis_url, *SHORT, engine=SLOW) as b:
            await wait_until(lambda: _is_resumed(client, request_id))
            for process in stalled:
                process.resume()
            await wait_until(lambda: "request.dropped" in a.log)
            found = await until_ended(client, KEYS, request_id)
            assert_unbroken(found, answer_to("stall", 400))
            assert len(starts_of(found)) == 2
            assert "request.dropped" not in b.log
            again = await c.submit("again", sampling={"max_tokens": 3})
            assert (await c.result(again)).text == answer_to("again", 3)
            assert await left_over(client) == set()


async def _is_resumed(client: redis.asyncio.Redis, request_id: str) -> bool:
    return len(starts_of(await events(client, KEYS, request_id))) == 2


@pytest.mark.slow
async def test_a_stalled_worker_whose_jobs_nobody_took_goes_on(redis_url: str, client: redis.asyncio.Redis) -> None:
    """It takes its leases again, in the same attempt."""
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as c,
        scripted_worker(redis_url, *SHORT, engine=SLOW) as a,
    ):
        request_id = await c.submit("alone", sampling={"max_tokens": 300})
        await until_delta(client, KEYS, request_id, at_least=10)
        a.send(signal.SIGSTOP)
        await wait_until(lambda: _has_lapsed(client, request_id))
        a.send(signal.SIGCONT)
        found = await until_ended(client, KEYS, request_id)
        assert_unbroken(found, answer_to("alone", 300))
        assert [attempt for attempt, _ in starts_of(found)] == [1, 1]
        assert "request.reacquired" in a.log


async def test_a_job_cancelled_while_nobody_runs_it_is_not_taken_over(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as c,
        scripted_worker(redis_url, *SHORT, engine=SLOW) as a,
    ):
        request_id = await c.submit("lost", sampling=ENDLESS)
        await until_delta(client, KEYS, request_id)
        a.send(signal.SIGKILL)
        await wait_until(lambda: _has_lapsed(client, request_id))
        await c.cancel(request_id)
        found = await until_ended(client, KEYS, request_id)
        assert found[-1].finish_reasons == ("cancelled",)
        async with scripted_worker(redis_url, *SHORT, engine=SLOW):
            again = await c.submit("again", sampling={"max_tokens": 3})
            assert (await c.result(again)).text == answer_to("again", 3)
        assert text_of(await events(client, KEYS, request_id)) == text_of(found)
