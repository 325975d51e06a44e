"""What the worker's background tasks share: they never end because Redis is away, they come back with jitter.

Knows which errors mean that Redis is away; knows nothing of what is done with it.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Never

from redis.exceptions import RedisError, ResponseError

from .log import get_logger

#: Redis is away or refuses the call. The built-in TimeoutError is an OSError.
REDIS_ERRORS: Final = (RedisError, OSError)
#: How a message begins that says what state the server is in: MISCONF, NOREPLICAS, CLUSTERDOWN. redis-py has classes
#: of its own for most, and takes off a plain ERR.
_STATE: Final = re.compile(r"(?!WRONGTYPE)[A-Z]{3,} ")
_CANCEL_AGAIN_SECONDS: Final = 0.5


def is_refused(exc: BaseException) -> bool:
    """Whether Redis refused this very call, and will again. Any other error is of the server as it is just now."""
    return type(exc) is ResponseError and not _STATE.match(str(exc))


class Backoff:
    """Seconds between tries: doubling up to a bound, each between half and the whole of its step."""

    def __init__(self, *, first: float = 0.05, bound: float = 1.0) -> None:
        self._first = first
        self._bound = bound
        self._step = first

    def next(self) -> float:
        step, self._step = self._step, min(self._step * 2, self._bound)
        return step * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._step = self._first


class Outage:
    """Says once that Redis went away from one part of the worker, and once that it is back."""

    def __init__(self, role: str) -> None:
        self._log: Any = get_logger(role)
        self._backoff = Backoff()
        self._tries = 0

    def failed(self, exc: BaseException) -> float:
        """The seconds to wait before the next try."""
        self._tries += 1
        if self._tries == 1:
            self._log.warning("redis.lost", error=type(exc).__name__)
        return self._backoff.next()

    def over(self) -> None:
        if self._tries:
            self._log.info("redis.found", tries=self._tries)
            self._tries = 0
            self._backoff.reset()


async def persist(action: Callable[[], Awaitable[object]], outage: Outage) -> None:
    """Do `action` until Redis lets it."""
    while True:
        try:
            await action()
        except REDIS_ERRORS as exc:
            await asyncio.sleep(outage.failed(exc))
        else:
            outage.over()
            return


async def every(seconds: float, action: Callable[[], Awaitable[object]], *, role: str) -> Never:
    """Do `action` now and each `seconds` from then on; after a Redis error again with backoff."""
    outage = Outage(role)
    while True:
        await persist(action, outage)
        await asyncio.sleep(seconds)


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and return when they have ended.

    Once is not enough: redis-py enters an `asyncio.timeout(0)` with each pooled command, and takes a cancellation that
    comes right before it for that timeout. The task then goes on as if nothing had happened.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
