"""The doorbell of cancellations: a message says whose cancel key was written, the key itself is what counts.

A message that is lost costs a third of a lease: each renewal looks at the keys too. Knows the channel and a
connection of its own; what a cancellation does is the lease's and the request's business.
"""

from __future__ import annotations

import asyncio
from typing import Final, Never

from redis.asyncio import Redis

from .background import REDIS_ERRORS, Outage
from .leases import Leases

#: Between two messages; then a half-open connection is found by a PING that gets no answer.
_QUIET_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 5.0


class CancellationBell:
    def __init__(self, connection: Redis, channel: str, leases: Leases) -> None:
        self._connection = connection
        self._channel = channel
        self._leases = leases

    async def listen(self) -> Never:
        """Subscribe, and again after each lost connection."""
        outage = Outage("cancellation", vital=False)
        while True:
            try:
                await self._hear(outage)
            except REDIS_ERRORS as exc:
                await asyncio.sleep(outage.failed(exc))

    async def _hear(self, outage: Outage) -> Never:
        async with self._connection.pubsub() as pubsub:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await pubsub.subscribe(self._channel)
            await self._leases.renew()  # what was said while nobody listened
            outage.over()
            quiet = False
            while True:
                message = await pubsub.get_message(timeout=_ANSWER_SECONDS if quiet else _QUIET_SECONDS)
                if message is None and quiet:
                    raise TimeoutError("no answer to a PING")
                if message is None:
                    await pubsub.ping()
                elif message["type"] == "message":
                    await self._leases.renew([message["data"].decode(errors="replace")])
                quiet = message is None
