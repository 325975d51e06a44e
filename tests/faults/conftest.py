"""Workers with the real model in fp32, servers that tests may hurt, and the answers of a run that nobody disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
from support.disturbed import Answers, Fleet, undisturbed_answers
from support.restarts import RestartableServer, restartable_server
from support.servers import valkey


@pytest.fixture(scope="session")
def answers(steady: Fleet) -> Answers:
    """What every request of this suite is answered with where nothing happens to it."""
    return asyncio.run(undisturbed_answers(steady))


@pytest.fixture(scope="session")
def steady() -> Iterator[Fleet]:
    """Workers on one server that lives as long as the suite: a test takes some, and leaves those that it spares."""
    with valkey() as url, Fleet.of(url) as fleet:
        yield fleet


@pytest.fixture
async def client(steady: Fleet) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(steady.url) as connection:
        yield connection


@pytest.fixture
def server() -> Iterator[RestartableServer]:
    """A server of this test's own, which appends everything to its file before it answers."""
    with restartable_server() as own:
        yield own


@pytest.fixture
def fleet(server: RestartableServer) -> Iterator[Fleet]:
    with Fleet.of(server.url) as workers:
        yield workers
