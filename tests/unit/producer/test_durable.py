"""A submission that is known to outlive the server: by its disk, by a replica, or not at all, and then it says so."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from support.sentinel import free_port
from support.servers import valkey
from support.waiting import wait_until

from inferq.producer import InferenceClient, NotDurable, RedisUnavailable, State
from inferq.producer.durable import _Means


@asynccontextmanager
async def producer_on(url: str) -> AsyncIterator[InferenceClient]:
    async with InferenceClient.from_url(url, model="tiny") as producer:
        yield producer


async def test_by_the_disk() -> None:
    with valkey("--appendonly", "yes", "--appendfsync", "everysec") as url:
        async with producer_on(url) as producer, redis.asyncio.Redis.from_url(url) as client:
            request_id = await producer.submit("x", durable=True)
            assert (await producer.status(request_id)).state is State.QUEUED
            assert (await client.info("commandstats"))["cmdstat_waitaof"]["calls"] == 1


async def test_without_file_or_replica_nothing_is_written() -> None:
    with valkey() as url:
        async with producer_on(url) as producer:
            with pytest.raises(NotDurable, match="no append-only file") as caught:
                await producer.submit("x", request_id="a", durable=True)
            assert caught.value.request_id is None
            assert (await producer.status("a")).state is State.UNKNOWN


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[str, redis.asyncio.Redis]]:
    """A primary that has a replica and no file, and a connection to the replica."""
    port = free_port()
    at_once = ("--repl-diskless-sync-delay", "0")
    with valkey("--port", str(port), *at_once) as url, valkey("--replicaof", f"127.0.0.1 {port}") as replica_url:
        async with redis.asyncio.Redis.from_url(replica_url) as replica:

            async def linked() -> bool:
                return (await replica.info("replication"))["master_link_status"] == "up"

            await wait_until(linked)
            yield url, replica


async def test_by_a_replica() -> None:
    async with pair() as (url, replica), producer_on(url) as producer:
        request_id = await producer.submit("x", durable=True)
        assert await replica.exists(producer._keys.events(request_id)), "it was acknowledged before it was there"


@asynccontextmanager
async def stopped(server: redis.asyncio.Redis) -> AsyncIterator[None]:
    process = (await server.info("server"))["process_id"]
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


async def test_a_replica_that_does_not_answer() -> None:
    async with pair() as (url, replica), producer_on(url) as producer:
        async with stopped(replica):
            with pytest.raises(NotDurable, match="a replica after 50 ms") as caught:
                await producer.submit("x", request_id="a", durable=True, durable_timeout=0.05)
        assert caught.value.request_id == "a"
        assert (await producer.status("a")).state is State.QUEUED


async def test_a_repetition_waits_for_what_the_first_one_wrote() -> None:
    """It writes nothing new itself, and on another connection than the first."""
    async with pair() as (url, replica), producer_on(url) as first, producer_on(url) as second:
        async with stopped(replica):
            request_id = await first.submit("x", idempotency_key="k")
            with pytest.raises(NotDurable):
                await second.submit("x", idempotency_key="k", durable=True, durable_timeout=0.05)
        assert await second.submit("x", idempotency_key="k", durable=True) == request_id


async def test_a_server_that_is_away() -> None:
    async with producer_on("unix:///nowhere/at/all.sock") as producer:
        with pytest.raises(RedisUnavailable):
            await producer.submit("x", durable=True)


@pytest.mark.parametrize(
    ("info", "means"),
    [
        ({"redis_version": "7.2.4", "aof_enabled": 1, "connected_slaves": 0}, _Means(disk=True, replicas=False)),
        ({"redis_version": "8.0.0", "aof_enabled": 1, "connected_slaves": 2}, _Means(disk=True, replicas=True)),
        ({"redis_version": "7.0.15", "aof_enabled": 1, "connected_slaves": 1}, _Means(disk=False, replicas=True)),
        ({"redis_version": "7.0.15", "aof_enabled": 1, "connected_slaves": 0}, "older than 7.2"),
        ({"redis_version": "7.2.4", "aof_enabled": 0, "connected_slaves": 0}, "no append-only file"),
    ],
)
def test_what_a_server_can_do(info: dict[str, Any], means: _Means | str) -> None:
    if isinstance(means, str):
        with pytest.raises(NotDurable, match=means):
            _Means.of(info)
    else:
        assert _Means.of(info) == means
