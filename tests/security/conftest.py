"""Servers that know the users of the ACL file and nobody else, one for each kind of server that there is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Final

import pytest
import redis.asyncio
from support.acl import Secured, secured_server, servers

_databases: Final = itertools.count(1)


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERQ_MODEL", "INFERQ_REDIS_URL", "INFERQ_SIGNING_KEY", "INFERQ_SIGNING_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session", params=servers().items(), ids=lambda server: server[0])
def secured_session(request: pytest.FixtureRequest) -> Iterator[Secured]:
    _, binary = request.param
    with secured_server(binary) as server:
        yield server


@pytest.fixture
async def secured(secured_session: Secured) -> AsyncIterator[Secured]:
    """An empty database of this test's own, on a server that has refused nothing yet."""
    own = dataclasses.replace(secured_session, database=next(_databases))
    own.refusals()
    yield own
    async with redis.asyncio.Redis.from_url(own.url("admin")) as admin:
        await admin.flushdb()


@pytest.fixture
async def admin(secured: Secured) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(secured.url("admin")) as connection:
        yield connection
