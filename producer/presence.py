"""Saying that somebody reads a request which is to be cancelled when nobody does any more.

One task of a client renews the mark of every such request that one of its streams is open on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

from redis.exceptions import RedisError

from .contract import READER_TTL_MS

if TYPE_CHECKING:
    from .commands import ProducerCommands

#: A mark that was renewed outlives two renewals that fail.
_PERIOD_S: Final = READER_TTL_MS / 1000 / 3
_PAUSE_S: Final = 1.0


class Presence:
    def __init__(self, commands: ProducerCommands, period_s: float = _PERIOD_S) -> None:
        self._commands = commands
        self._period_s = period_s
        self._readers: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    async def enter(self, request_id: str) -> None:
        """A stream of the request is read from now on, until `leave`. Raises redis-py's errors."""
        self._readers[request_id] += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._renew(), name="inferq-presence")
        await self._commands.touch_reader(request_id)

    def leave(self, request_id: str) -> None:
        self._readers[request_id] -= 1
        if self._readers[request_id] <= 0:
            del self._readers[request_id]
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _renew(self) -> None:
        pause_s = self._period_s
        while self._task is asyncio.current_task():  # a cancellation may have been lost
            await asyncio.sleep(pause_s)
            pause_s = self._period_s if await self._touched_all() else min(_PAUSE_S, self._period_s)

    async def _touched_all(self) -> bool:
        try:
            for request_id in tuple(self._readers):
                await self._commands.touch_reader(request_id)
        except (RedisError, OSError):  # the streams themselves say that the server is away
            return False
        return True
