"""Where a URL leads: TLS, Sentinels and the primary that they name, and what is refused before anything is tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis.asyncio
from redis.asyncio.sentinel import SentinelConnectionPool
from support.reading import generate, kinds, read, until_blocked
from support.sentinel import Guarded, guarded
from support.servers import valkey
from support.tls import encrypted
from support.wire import Wire

from inferq.producer import InferenceClient, InferqError, RedisUnavailable, State, UnsuitableConnection, connect
from inferq.producer.connection import blocking_connection

PASSWORD = "p@ss:w/rd#%é?"


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Guarded]:
    with guarded(password=PASSWORD) as found:
        yield found


async def test_sentinels_name_the_primary(sentinels: Guarded) -> None:
    credentials = f":{quote(PASSWORD, safe='')}@"
    nobody = "127.0.0.1:1,"
    async with InferenceClient.from_url(sentinels.url(credentials, others=nobody), model="tiny") as producer:
        request_id = await producer.submit("x", durable=True)
        assert (await producer.status(request_id)).state is State.QUEUED
    async with redis.asyncio.Redis.from_url(sentinels.primary, password=sentinels.password) as primary:
        assert await primary.exists(f"inferq:{request_id}:events")


async def test_sentinels_that_ask_for_no_password_are_given_none(sentinels: Guarded) -> None:
    wrong = sentinels.url(":wrong@")
    async with InferenceClient.from_url(wrong, model="tiny") as producer:
        with pytest.raises(RedisUnavailable, match="credentials"):
            await producer.submit("x")


async def test_a_failover_is_a_pause() -> None:
    with guarded() as sentinels:
        url = sentinels.url()
        async with InferenceClient.from_url(url, model="tiny") as producer, connect(url) as follower:
            wire = Wire(follower)
            await wire.redis.set(wire.keys.card, '{"model":"tiny"}', px=600_000)
            job = await wire.claimed("a")
            reader = asyncio.create_task(read(producer.stream("a")))
            await until_blocked(wire.redis)
            await generate(wire, job, last=2, end=False)
            await wire.redis.wait(1, 10_000)
            await asyncio.to_thread(sentinels.fail_over)
            await generate(wire, job, first=3)
            assert kinds(await reader) == ["queued", "started", "delta", "delta", "delta", "delta", "finished"]
            assert (await wire.redis.config_get("port"))["port"] == sentinels.replica_port


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("redis+sentinel://a,b:7/main", [("a", 26379), ("b", 7)]),
        ("redis+sentinel://u:p@a:1,[::1]:2/main/3?sentinel_password=s&socket_timeout=2", [("a", 1), ("::1", 2)]),
        ("rediss+sentinel://a/main/3?ssl_ca_certs=/ca.pem&sentinel_username=u", [("a", 26379)]),
    ],
)
def test_what_a_url_of_sentinels_says(url: str, hosts: list[tuple[str, int]]) -> None:
    pool = connect(url).connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    manager = pool.sentinel_manager
    each = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    assert [(options["host"], options["port"]) for options in each] == hosts
    assert pool.service_name == "main"
    if "u:p@" in url:
        assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("u", "p")
        assert (pool.connection_kwargs["db"], pool.connection_kwargs["socket_timeout"]) == (3, 2.0)
        assert (each[0]["password"], each[0].get("username")) == ("s", None)
    if "rediss" in url:
        assert pool.connection_class.__name__ == "SentinelManagedSSLConnection"
        assert pool.connection_kwargs["ssl_check_hostname"] is True
        assert manager.sentinels[0].connection_pool.connection_class.__name__ == "SSLConnection"
        assert each[0]["ssl_ca_certs"] == "/ca.pem"


def test_a_second_connection_leads_to_the_same_sentinels() -> None:
    client = connect("redis+sentinel://u:p@a:1/main/3")
    pool = blocking_connection(client).connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert (pool.service_name, pool.sentinel_manager) == ("main", client.connection_pool.sentinel_manager)
    assert pool.connection_kwargs["socket_timeout"] is None
    assert pool.connection_kwargs["password"] == "p"
    assert pool.make_connection().connection_pool.service_name == "main"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a,b",
        "redis+sentinel://a/",
        "redis+sentinel:///main",
        "redis+sentinel://a,,b/main",
        "redis+sentinel://a:port/main",
        "redis+sentinel://:secret@a/main/db",
        "sentinel://a/main",
        "redis+sentinel://:secret@a/main?no_such_option=1",
        "redis://:secret@h?no_such_option=1",
        "unix://",
        "unix://:secret@?db=1",
        "unix://secret.sock",
        "rediss://:secret@h?ssl_cert_reqs=perhaps",
        "redis://:secret@h?ssl_ca_certs=/ca.pem",
    ],
)
def test_what_cannot_be_used_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UnsuitableConnection) as caught:
        connect(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


class TestTls:
    @pytest.fixture
    def socket(self) -> Iterator[Path]:
        with valkey() as url:
            yield Path(url.removeprefix("unix://"))

    @pytest.fixture
    async def port(self, socket: Path, tmp_path: Path) -> AsyncIterator[int]:
        async with encrypted(socket, tmp_path) as port:
            yield port

    async def tried(self, url: str) -> None:
        async with connect(url, retries=0) as client, InferenceClient(client, model="tiny") as producer:
            request_id = await producer.submit("x")
            assert (await anext(producer.stream(request_id))).type in ("queued", "no_worker")

    async def test_a_certificate_that_is_trusted(self, port: int, tmp_path: Path) -> None:
        await self.tried(f"rediss://localhost:{port}?ssl_ca_certs={tmp_path}/cert.pem")

    async def test_one_that_is_not_trusted_is_refused(self, port: int) -> None:
        with pytest.raises(RedisUnavailable, match="certificate verify failed"):
            await self.tried(f"rediss://localhost:{port}")

    async def test_the_name_is_checked(self, port: int, tmp_path: Path) -> None:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={tmp_path}/cert.pem"
        with pytest.raises(RedisUnavailable, match="certificate verify failed"):
            await self.tried(url)
        await self.tried(f"{url}&ssl_check_hostname=no")

    async def test_nothing_is_checked_when_that_is_said(self, port: int) -> None:
        await self.tried(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none")

    async def test_a_server_that_asks_who_comes(self, socket: Path, tmp_path: Path) -> None:
        async with encrypted(socket, tmp_path, ask_client=True) as port:
            url = f"rediss://localhost:{port}?ssl_ca_certs={tmp_path}/cert.pem"
            with pytest.raises(InferqError):
                await self.tried(url)
            await self.tried(f"{url}&ssl_certfile={tmp_path}/cert.pem&ssl_keyfile={tmp_path}/key.pem")
