"""A pytest plugin that runs the commands of a `Wire` as the users of the ACL file, for suites that know of none.

INFERQ_TEST_REDIS_URL must lead to such a server, as its admin. A call that is refused fails its test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import pytest
import redis
import redis.asyncio

from inferq.producer.address import pool_like
from inferq.producer.commands import ProducerCommands
from inferq.worker.commands import WorkerCommands

from .acl import PASSWORDS
from .wire import Wire

_plain_post_init: Final = Wire.__post_init__


def _as_user(connection: redis.asyncio.Redis, user: str) -> redis.asyncio.Redis:
    """A connection to the same database as that user; it closes when the given one does."""
    pool = pool_like(connection.connection_pool, {"username": user, "password": PASSWORDS[user]})
    other, close = redis.asyncio.Redis.from_pool(pool), connection.aclose

    async def close_both() -> None:
        await other.aclose()
        await close()

    connection.aclose = close_both  # type: ignore[method-assign]
    return other


def _post_init(wire: Wire) -> None:
    _plain_post_init(wire)
    wire.producer = ProducerCommands(_as_user(wire.redis, "producer"), wire.keys)
    wire.worker = WorkerCommands(_as_user(wire.redis, "worker"), wire.keys)


@pytest.fixture(autouse=True)
def nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Wire, "__post_init__", _post_init)
    with redis.Redis.from_url(os.environ["INFERQ_TEST_REDIS_URL"]) as admin:
        admin.acl_log_reset()
        yield
        refused: list[dict[str, Any]] = admin.acl_log()
    assert not refused, [(entry["username"], entry["object"]) for entry in refused]
