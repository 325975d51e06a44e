"""Enqueueing a job so that it is known to outlive the server: it waits for the disk, and for a replica if there is one.

All of it is one connection's work, since WAIT and WAITAOF speak of what their own connection has written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from redis.asyncio import Redis

from .commands import ProducerCommands
from .contract import JOB_TTL_MS, Keys
from .errors import NotDurable

if TYPE_CHECKING:
    from .commands import Enqueued

#: The first version that has WAITAOF. Valkey tells the version of Redis that it stands for.
_WAITAOF_SINCE: Final = (7, 2)
#: What the commands may take besides the waiting.
_ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Means:
    """What the server has to keep what it accepted."""

    disk: bool
    replicas: bool

    @classmethod
    def of(cls, info: dict[str, Any]) -> _Means:
        """Raises NotDurable if there is nothing."""
        version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
        has_file = bool(info.get("aof_enabled"))
        means = cls(disk=has_file and version >= _WAITAOF_SINCE, replicas=bool(info.get("connected_slaves")))
        if means.disk or means.replicas:
            return means
        lacking = "is older than 7.2, which cannot wait for its" if has_file else "keeps no append-only file"
        raise NotDurable(f"the server {lacking} and has no replica (appendonly yes): nothing was written")


async def enqueue_durably(
    blocking: Redis,
    keys: Keys,
    request_id: str,
    enqueue: Callable[[ProducerCommands], Awaitable[Enqueued]],
    *,
    timeout_s: float,
) -> None:
    """Call `enqueue` with a connection of its own, and return when what it wrote is safe.

    Raises NotDurable when the server has no means to that, before anything is written, or when it is not done in time.
    """
    async with Redis(connection_pool=blocking.connection_pool, single_connection_client=True) as connection:
        async with asyncio.timeout(_ANSWER_S):
            means = _Means.of(await connection.info())
            await enqueue(ProducerCommands(connection, keys))
            # The job may be an earlier submission's, written on another connection: this one must write after it.
            await connection.pexpire(keys.job(request_id), JOB_TTL_MS)
        async with asyncio.timeout(2 * timeout_s + _ANSWER_S):
            await _wait(connection, means, request_id, round(timeout_s * 1000))


async def _wait(connection: Redis, means: _Means, request_id: str, timeout_ms: int) -> None:
    timeout_ms = max(1, timeout_ms)  # 0 would be for ever
    if means.disk:
        num_local, _ = await connection.waitaof(1, 0, timeout_ms)
        _check(num_local, request_id, "the disk", timeout_ms)
    if means.replicas:
        _check(await connection.wait(1, timeout_ms), request_id, "a replica", timeout_ms)


def _check(number: int, request_id: str, where: str, timeout_ms: int) -> None:
    if not number:
        raise NotDurable(
            f"the job {request_id} was accepted, but was not on {where} after {timeout_ms} ms", request_id=request_id
        )
