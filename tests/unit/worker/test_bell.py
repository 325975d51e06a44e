"""The two doorbells against a real server: rings are heard, passed on when there is no room, and never hoarded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio
from support.waiting import wait_until

from inferq.producer.connection import blocking_connection, connect
from inferq.producer.contract import BELL_TTL_S
from inferq.worker.bell import QueueBell

KEY = "inferq:m:bell"


@asynccontextmanager
async def listening(url: str, wanted: asyncio.Event) -> AsyncIterator[list[str]]:
    heard: list[str] = []
    pool = connect(url)
    async with pool, blocking_connection(pool) as line:
        task = asyncio.create_task(QueueBell(line, KEY, wanted=wanted, ring=lambda: heard.append("ring")).listen())
        try:
            yield heard
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def waiting(client: redis.asyncio.Redis) -> list[str]:
    """The connections to this test's database that wait for a ring."""
    number = str(client.connection_pool.connection_kwargs["db"])
    return [each["id"] for each in await client.client_list() if each["cmd"] == "blpop" and each["db"] == number]


async def waits(client: redis.asyncio.Redis) -> bool:
    return bool(await waiting(client))


async def idles(client: redis.asyncio.Redis) -> bool:
    return not await waits(client)


async def test_after_an_error_it_listens_on_another_connection(redis_url: str, client: redis.asyncio.Redis) -> None:
    """A server that was demoted refuses to wait, and keeps the connection."""
    wanted = asyncio.Event()
    wanted.set()
    await client.set(KEY, "no list")
    async with listening(redis_url, wanted) as heard:
        await wait_until(lambda: _refusals(client))
        before = (await client.info("stats"))["total_connections_received"]
        await wait_until(lambda: _has_more_connections(client, before))
        await client.delete(KEY)
        await wait_until(lambda: waits(client))
        await client.lpush(KEY, 1)
        await wait_until(lambda: heard)


async def _refusals(client: redis.asyncio.Redis) -> bool:
    return bool((await client.info("errorstats")).get("errorstat_WRONGTYPE"))


async def _has_more_connections(client: redis.asyncio.Redis, before: int) -> bool:
    return int((await client.info("stats"))["total_connections_received"]) > before


async def test_a_ring_is_heard(redis_url: str, client: redis.asyncio.Redis) -> None:
    wanted = asyncio.Event()
    wanted.set()
    async with listening(redis_url, wanted) as heard:
        await client.lpush(KEY, 1, 1)
        await wait_until(lambda: len(heard) == 2)
    assert not await client.exists(KEY)


async def test_without_room_nobody_listens(redis_url: str, client: redis.asyncio.Redis) -> None:
    wanted = asyncio.Event()
    async with listening(redis_url, wanted) as heard:
        await client.lpush(KEY, 1)
        await client.expire(KEY, 60)
        for _ in range(20):
            await asyncio.sleep(0)
        assert heard == []
        assert await client.llen(KEY) == 1
        wanted.set()
        await wait_until(lambda: heard)


async def test_a_ring_that_comes_when_the_room_has_gone_is_passed_on(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    wanted = asyncio.Event()
    wanted.set()
    async with listening(redis_url, wanted) as heard:
        await wait_until(lambda: waits(client))
        wanted.clear()
        await client.lpush(KEY, 1)
        await wait_until(lambda: idles(client))
        await wait_until(lambda: client.llen(KEY))
        assert 0 < await client.ttl(KEY) <= BELL_TTL_S
        assert heard == []


async def test_a_broken_connection_is_replaced(redis_url: str, client: redis.asyncio.Redis) -> None:
    wanted = asyncio.Event()
    wanted.set()
    async with listening(redis_url, wanted) as heard:
        await wait_until(lambda: waits(client))
        for number in await waiting(client):
            await client.client_kill_filter(_id=number)
        await client.lpush(KEY, 1)
        await client.expire(KEY, 60)
        await wait_until(lambda: heard)
