"""What the worker's background tasks share: while Redis is away they come back with jitter, for as long as it takes.

A server that answers, and refuses, is another matter: the log names its reason, and what no waiting will change ends
the worker. Knows which errors mean what; knows nothing of what is done with Redis.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Never

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from inferq.producer.backoff import Backoff
from inferq.producer.connection import LOST, is_refusal

from .errors import RedisRefuses
from .log import get_logger

#: Redis is away or refuses the call. The built-in TimeoutError is an OSError.
REDIS_ERRORS: Final = (RedisError, OSError)
#: How a message begins that says what state the server is in, or what the user may not do: MISCONF, NOREPLICAS, ACL.
#: redis-py has classes of its own for most, and takes off a plain ERR.
_STATE: Final = re.compile(r"(?!WRONGTYPE)[A-Z]{3,}(?= )")
#: States that pass with a failover or a start: the server is away.
_PASSING: Final = frozenset({"CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN"})
#: What Redis has refused for so long, with no other answer in between, is given up.
PATIENCE_SECONDS: Final = 30.0
_SAY_AGAIN_SECONDS: Final = 60.0
_MAX_REASON_CHARS: Final = 200
_CANCEL_AGAIN_SECONDS: Final = 0.5


def is_refused(exc: BaseException) -> bool:
    """Whether Redis refused this very call, and will again. Any other error is of the server as it is just now."""
    return type(exc) is ResponseError and not _STATE.match(str(exc))


def is_away(exc: BaseException) -> bool:
    """Whether Redis gave no answer, or one that its start or a failover will change."""
    if is_refusal(exc):
        return False
    return isinstance(exc, LOST) or _state_of(exc) in _PASSING


def is_hopeless(exc: BaseException) -> bool:
    """Whether waiting changes nothing: the worker may not do it, or a key that it shares is of another type."""
    return is_refused(exc) or is_refusal(exc) or _is_denied(exc)


def reason_of(exc: BaseException) -> str:
    """What may be logged of an error: its state or class, and what a user may not do. Others may quote a job."""
    if _is_denied(exc):
        return f"NOPERM {exc}"[:_MAX_REASON_CHARS]
    if is_refused(exc) and str(exc).startswith("WRONGTYPE "):
        return "WRONGTYPE"
    return _state_of(exc) or type(exc).__name__


def _is_denied(exc: BaseException) -> bool:
    return isinstance(exc, NoPermissionError) or _state_of(exc) == "ACL"  # which is how a script's command is denied


def _state_of(exc: BaseException) -> str | None:
    state = _STATE.match(str(exc)) if type(exc) is ResponseError else None
    return state and state[0]


class Outage:
    """Of one part of the worker: says that Redis is away or refuses, and why, and once that it is back.

    `vital` is False for a part that the worker can do without, or that gives up by itself.
    """

    def __init__(self, role: str, *, vital: bool = True) -> None:
        self._role = role
        self._vital = vital
        self._log: Any = get_logger(role)
        self._backoff = Backoff()
        self._tries = 0
        self._said: tuple[str, float] | None = None  # the last reason in the log, and when
        self._refused_since: float | None = None
        self._hopeless_since: float | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether Redis has answered for PATIENCE_SECONDS, with nothing but refusals."""
        return _has_lasted(self._refused_since)

    def failed(self, exc: BaseException) -> float:
        """The seconds to wait before the next try. Raises RedisRefuses when no try will ever get through."""
        self._tries += 1
        now = time.monotonic()
        self._refused_since = None if is_away(exc) else self._refused_since or now
        self._hopeless_since = self._hopeless_since or now if is_hopeless(exc) else None
        self._say(exc, now)
        if self._vital and _has_lasted(self._hopeless_since):
            raise RedisRefuses(self._role, reason_of(exc)) from exc
        return self._backoff.next()

    def over(self) -> None:
        if self._tries:
            self._log.info("redis.found", tries=self._tries)
            self._tries = 0
            self._said = self._refused_since = self._hopeless_since = None
            self._backoff.reset()

    def _say(self, exc: BaseException, now: float) -> None:
        """A loss once, whatever its errors; a refusal whenever its reason changes, and again from time to time."""
        reason = "" if is_away(exc) else reason_of(exc)
        if self._said is not None and self._said[0] == reason and now - self._said[1] < _SAY_AGAIN_SECONDS:
            return
        self._said = reason, now
        if reason:
            self._log.error("redis.refuses", error=type(exc).__name__, reason=reason, tries=self._tries)
        else:
            self._log.warning("redis.lost", error=type(exc).__name__, tries=self._tries)


def _has_lasted(since: float | None) -> bool:
    return since is not None and time.monotonic() - since >= PATIENCE_SECONDS


async def persist(action: Callable[[], Awaitable[object]], outage: Outage) -> None:
    """Do `action` until Redis lets it. Raises RedisRefuses when it never will."""
    while True:
        try:
            await action()
        except REDIS_ERRORS as exc:
            await asyncio.sleep(outage.failed(exc))
        else:
            outage.over()
            return


async def every(seconds: float, action: Callable[[], Awaitable[object]], *, role: str) -> Never:
    """Do `action` now and each `seconds` from then on; after a Redis error again with backoff.

    Raises RedisRefuses when it will never be let.
    """
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
