"""The doorbell of the queue: an idle worker waits here for a producer's ring instead of asking again and again.

One ring wakes one worker. A ring that is lost costs the time of the fallback poll. Knows the list and a connection of
its own; knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, Never, cast

from redis.asyncio import Redis

from inferq.producer.contract import BELL_LENGTH, BELL_TTL_S

from .background import REDIS_ERRORS, Outage

_WAIT_SECONDS: Final = 5
#: A half-open connection never answers: then the wait is given up, and the next one gets a connection of its own.
_GIVE_UP_SECONDS: Final = 8.0


class QueueBell:
    """`wanted` is set while there is room for a job: without, the ring is left to others."""

    def __init__(self, connection: Redis, key: str, *, wanted: asyncio.Event, ring: Callable[[], object]) -> None:
        self._connection = connection
        self._key = key
        self._wanted = wanted
        self._ring = ring

    async def listen(self) -> Never:
        outage = Outage("bell", vital=False)
        while True:
            await self._wanted.wait()
            try:
                await self._wait_once()
            except REDIS_ERRORS as exc:
                # A server that was demoted refuses, and keeps the connection: the next one may lead to its successor.
                with contextlib.suppress(*REDIS_ERRORS):
                    await self._connection.connection_pool.disconnect()
                await asyncio.sleep(outage.failed(exc))
            else:
                outage.over()

    async def _wait_once(self) -> None:
        async with asyncio.timeout(_GIVE_UP_SECONDS):
            rung = await cast("Awaitable[Any]", self._connection.blpop([self._key], timeout=_WAIT_SECONDS))
        if rung is None:
            return
        if self._wanted.is_set():
            self._ring()
            await asyncio.sleep(0)  # so that whoever claims sees first whether there is still room
        else:
            await self._pass_on()

    async def _pass_on(self) -> None:
        """The room went while we waited: the ring is for somebody else."""
        async with self._connection.pipeline(transaction=True) as pipe:
            pipe.lpush(self._key, 1)
            pipe.ltrim(self._key, 0, BELL_LENGTH - 1)
            pipe.expire(self._key, BELL_TTL_S)
            await pipe.execute()
