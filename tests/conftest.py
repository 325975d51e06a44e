"""Fixtures that every suite shares: one server a session, one database a test, and nothing left without its TTL."""

from __future__ import annotations

import itertools
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from support.servers import suite_server

pytest_plugins = ["support.sampling", "support.parallel"]

#: Keys that live as long as they have members; the contract's table says so.
WITHOUT_TTL = ("queue", "running", "deadlines", "workers", "dead", "vtime")
_databases = itertools.count()


def pytest_configure() -> None:
    """A shell has its background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The URL of the server, without a database."""
    with suite_server() as url:
        yield url


@pytest.fixture
async def redis_url(redis_server: str) -> AsyncIterator[str]:
    """The URL of an empty database of this test's own. At the end no key may be left without its TTL."""
    with redis.Redis.from_url(redis_server) as probe:
        number = next(_databases) % int(probe.config_get("databases")["databases"])
    separator = "&" if "?" in redis_server else "?"
    url = f"{redis_server}{separator}db={number}"
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.flushdb()
        yield url
        async for key in client.scan_iter(count=1000):
            name = key.decode().rsplit(":", 1)[-1]
            if name not in WITHOUT_TTL and await client.ttl(key) == -1:
                pytest.fail(f"{key!r} was left without a TTL")
        await client.flushdb()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder whose path is short enough for a socket in it; that of `tmp_path` need not be."""
    with tempfile.TemporaryDirectory(prefix="inferq-test-") as name:
        yield Path(name)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain connection to this test's database."""
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        yield connection
