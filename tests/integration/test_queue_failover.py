"""The server goes away while streams run, comes back with less, or refuses to write: no stream is hurt by it."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis.asyncio
from redis.exceptions import ReadOnlyError
from support.processes import scripted, start_worker
from support.queue import ENDLESS, KEYS, MODEL, answer_to, left_over, scripted_worker
from support.restarts import restartable_server
from support.sentinel import guarded
from support.servers import valkey
from support.streams import assert_unbroken, events, starts_of, text_of, tokens_of, until_delta, until_ended
from support.waiting import wait_until

from inferq.producer import InferenceClient, connect
from inferq.worker.main import Exit
from inferq.worker.service import open_redis

SLOW = ["--step-ms", "10"]


@pytest.mark.slow
async def test_a_restart_within_the_lease_costs_a_stream_nothing() -> None:
    with restartable_server() as server:
        async with scripted_worker(server.url, "--lease-seconds", "60", engine=SLOW) as worker:
            async with (
                redis.asyncio.Redis.from_url(server.url) as client,
                InferenceClient.from_url(server.url, model=MODEL) as producer,
            ):
                request_id = await producer.submit("through", sampling={"max_tokens": 300})
                await until_delta(client, KEYS, request_id, at_least=10)
            server.kill()
            await wait_until(lambda: "redis.lost" in worker.log)
            server.start()
            async with redis.asyncio.Redis.from_url(server.url) as client:
                events = await until_ended(client, KEYS, request_id)
            assert text_of(events) == answer_to("through", 300)
            assert events[-1].finish_reasons == ("length",)


async def test_a_restart_longer_than_the_lease_costs_a_stream_nothing() -> None:
    """Its owner takes the lease again, in the same attempt and a new epoch; so it does with the other streams."""
    with restartable_server() as server:
        flags = ("--lease-seconds", "0.5")
        async with scripted_worker(server.url, *flags, engine=SLOW) as worker:
            async with (
                redis.asyncio.Redis.from_url(server.url) as client,
                InferenceClient.from_url(server.url, model=MODEL) as producer,
            ):
                ids = [await producer.submit(f"too long {n}", sampling={"max_tokens": 400}) for n in range(3)]
                for request_id in ids:
                    await until_delta(client, KEYS, request_id)
                server.kill()
            # Nothing can renew the lease now, so it has lapsed when the time of its length has passed.
            killed_at = time.monotonic()
            await wait_until(lambda: time.monotonic() > killed_at + 0.6)
            server.start()
            async with redis.asyncio.Redis.from_url(server.url) as client:
                for number, request_id in enumerate(ids):
                    found = await until_ended(client, KEYS, request_id)
                    assert_unbroken(found, answer_to(f"too long {number}", 400))
                    assert {attempt for attempt, _ in starts_of(found)} == {1}
                assert "request.reacquired" in worker.log
                assert await left_over(client) == set()


@pytest.mark.slow
async def test_a_failover_that_lost_a_streams_tail_costs_it_nothing() -> None:
    """What was acknowledged and is gone is sent again: readers who had it see no repeat, the others no hole."""
    with restartable_server() as server:
        async with scripted_worker(server.url, "--lease-seconds", "60", engine=SLOW) as worker:
            async with (
                redis.asyncio.Redis.from_url(server.url) as client,
                InferenceClient.from_url(server.url, model=MODEL) as producer,
            ):
                request_id = await producer.submit("tail", sampling={"max_tokens": 300})
                await until_delta(client, KEYS, request_id, at_least=20)
                server.replicate()
                kept = len(tokens_of(await events(client, KEYS, request_id)))
                await until_delta(client, KEYS, request_id, at_least=kept + 40)
            server.fail_over()
            async with redis.asyncio.Redis.from_url(server.url) as client:
                found = await until_ended(client, KEYS, request_id)
            assert_unbroken(found, answer_to("tail", 300))
            assert [attempt for attempt, _ in starts_of(found)] == [1, 1]
            assert 20 <= starts_of(found)[1][1] <= kept
            assert "request.reacquired" in worker.log


@pytest.mark.slow
async def test_a_failover_that_lost_a_claim_costs_the_job_nothing() -> None:
    """The job waits again, though it runs: its owner takes it back before anybody else does."""
    with restartable_server() as server:
        async with scripted_worker(server.url, "--max-num-seqs", "1", engine=SLOW):
            async with (
                redis.asyncio.Redis.from_url(server.url) as client,
                InferenceClient.from_url(server.url, model=MODEL) as producer,
            ):
                busy = await producer.submit("busy", sampling=ENDLESS)
                await until_delta(client, KEYS, busy)
                request_id = await producer.submit("claim", sampling={"max_tokens": 200})
                server.replicate()
                await producer.cancel(busy)
                await until_delta(client, KEYS, request_id, at_least=10)
            server.fail_over()
            async with redis.asyncio.Redis.from_url(server.url) as client:
                found = await until_ended(client, KEYS, request_id)
                assert_unbroken(found, answer_to("claim", 200))
                assert {attempt for attempt, _ in starts_of(found)} == {1}


@pytest.mark.slow
async def test_scripts_that_the_server_has_forgotten_are_sent_again(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    async with (
        scripted_worker(redis_url, engine=SLOW) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        request_id = await producer.submit("flush", sampling={"max_tokens": 200})
        await until_delta(client, KEYS, request_id)
        await client.script_flush()
        assert_unbroken(await until_ended(client, KEYS, request_id), answer_to("flush", 200))
        assert "redis.lost" not in worker.log


@pytest.mark.slow
async def test_a_server_that_became_a_replica_is_waited_out() -> None:
    """It refuses each write until somebody makes it a primary again."""
    with valkey() as url:
        async with scripted_worker(url, "--lease-seconds", "60", engine=SLOW) as worker:
            async with (
                redis.asyncio.Redis.from_url(url) as client,
                InferenceClient.from_url(url, model=MODEL) as producer,
            ):
                request_id = await producer.submit("replica", sampling={"max_tokens": 200})
                await until_delta(client, KEYS, request_id)
                await client.replicaof("127.0.0.1", 1)
                await wait_until(lambda: "ReadOnlyError" in worker.log)
                await client.replicaof("NO", "ONE")
                assert_unbroken(await until_ended(client, KEYS, request_id), answer_to("replica", 200))


async def test_a_connection_to_a_replica_is_dropped() -> None:
    """The server stays a replica and keeps its connections: only another one may lead to its successor."""
    with valkey() as url:
        async with redis.asyncio.Redis.from_url(url) as other, open_redis(url) as connection:
            before = await connection.client_id()
            assert await connection.client_id() == before
            await other.replicaof("127.0.0.1", 1)
            with pytest.raises(ReadOnlyError):
                await connection.set("key", "value")
            assert await connection.client_id() != before


@pytest.mark.slow
async def test_a_worker_waits_for_a_server_that_hangs() -> None:
    """Nothing answers, and no connection breaks: the worker generates on, and its requests pause over the bound."""
    with restartable_server() as server:
        flags = ("--lease-seconds", "60", "--max-unsent-tokens", "30")
        async with scripted_worker(server.url, *flags, engine=SLOW) as worker:
            async with (
                redis.asyncio.Redis.from_url(server.url) as client,
                InferenceClient.from_url(server.url, model=MODEL) as producer,
            ):
                request_id = await producer.submit("hang", sampling={"max_tokens": 300})
                await until_delta(client, KEYS, request_id)
                server.suspend()
                # The worker's own bound on an answer.
                await wait_until(lambda: "redis.lost" in worker.log)
                server.resume()
                assert_unbroken(await until_ended(client, KEYS, request_id), answer_to("hang", 300))
                assert {attempt for attempt, _ in starts_of(await events(client, KEYS, request_id))} == {1}


async def test_a_worker_follows_the_sentinels_to_the_next_primary() -> None:
    """The primary is demoted in mid-stream, and keeps its connections; Sentinel alone says who comes next."""
    with guarded(password="secret") as servers:
        url = servers.url(":secret@")
        async with (
            scripted_worker(url, engine=SLOW) as worker,
            InferenceClient.from_url(url, model=MODEL) as producer,
            connect(url) as client,
        ):
            ids = [await producer.submit(f"sentinel {number}", sampling={"max_tokens": 400}) for number in range(3)]
            results = [asyncio.create_task(producer.result(request_id)) for request_id in ids]
            for request_id in ids:
                await until_delta(client, KEYS, request_id, at_least=10)
            await asyncio.to_thread(servers.fail_over)
            for number, (request_id, result) in enumerate(zip(ids, results, strict=True)):
                assert (await result).text == answer_to(f"sentinel {number}", 400)
                found = await until_ended(client, KEYS, request_id)
                assert_unbroken(found, answer_to(f"sentinel {number}", 400))
                assert {attempt for attempt, _ in starts_of(found)} == {1}
            assert await left_over(client) == set()
            assert "secret" not in worker.log
        with start_worker(servers.url("", others="127.0.0.1:1,"), environment=scripted()) as worker:
            assert await worker.wait() == Exit.NO_REDIS


@pytest.mark.slow
async def test_a_stall_longer_than_the_lease_costs_no_attempt() -> None:
    """Two healthy workers, and a server that answers nobody for a while: neither takes the other's streams for lost."""
    with restartable_server() as server:
        flags = ("--lease-seconds", "1")
        async with (
            scripted_worker(server.url, *flags, engine=SLOW),
            scripted_worker(server.url, *flags, engine=SLOW),
            redis.asyncio.Redis.from_url(server.url) as client,
            InferenceClient.from_url(server.url, model=MODEL) as producer,
        ):
            ids = [await producer.submit(f"stall {n}", sampling={"max_tokens": 1500}) for n in range(6)]
            for request_id in ids:
                await until_delta(client, KEYS, request_id)
            for _ in range(3):
                server.suspend()
                suspended_at = time.monotonic()
                await wait_until(lambda since=suspended_at: time.monotonic() > since + 2)
                server.resume()
                resumed_at = time.monotonic()
                await wait_until(lambda since=resumed_at: time.monotonic() > since + 1.5)
            for number, request_id in enumerate(ids):
                found = await until_ended(client, KEYS, request_id)
                assert_unbroken(found, answer_to(f"stall {number}", 1500))
                assert {attempt for attempt, _ in starts_of(found)} == {1}


async def test_a_full_server_refuses_tokens_and_still_takes_the_end() -> None:
    with valkey("--maxmemory-policy", "noeviction") as url:
        async with scripted_worker(url, engine=SLOW) as worker:
            async with (
                redis.asyncio.Redis.from_url(url) as client,
                InferenceClient.from_url(url, model=MODEL) as producer,
            ):
                request_id = await producer.submit("full", sampling=ENDLESS)
                await until_delta(client, KEYS, request_id)
                await client.config_set("maxmemory", "1mb")
                await wait_until(lambda: "OutOfMemoryError" in worker.log)
                await client.config_set("maxmemory", "0")
                found = len(await client.xrange(KEYS.events(request_id)))
                await wait_until(lambda: _longer(client, request_id, found))
                await producer.cancel(request_id)
                events = await until_ended(client, KEYS, request_id)
                assert events[-1].finish_reasons == ("cancelled",)
                assert text_of(events) == answer_to("full", events[-1].usage.completion_tokens)


async def _longer(client: redis.asyncio.Redis, request_id: str, length: int) -> bool:
    return await client.xlen(KEYS.events(request_id)) > length
