"""The loop behind one connection of the multiplexer: issue a read, hand out what it brought, issue the next.

Survives lost connections: its subscribers are told to look at their streams by other means, and it begins again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import RedisError

from .backoff import Backoff
from .cancellation import cancelled
from .connection import LOST
from .position import EntryId

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from .multiplexer import Subscription

#: How long one read is blocked at the most.
BLOCK_MS: Final = 5000
#: An answer that is later than this is not coming: the connection is half open.
ANSWER_S: Final = 3.0
#: What one answer may hold of all streams together, and of any one of them.
_ENTRIES_PER_ANSWER: Final = 4000
_ENTRIES_PER_KEY: Final = 500
_LEAST_PER_KEY: Final = 8
_WAKE_TTL_MS: Final = 60_000
#: Before the next read where a read of all was refused, and no key alone is.
_REFUSED_PAUSE_S: Final = 1.0


class Shard:
    """Reads the streams of its subscriptions until there are none. `on_end` is then called with its task."""

    def __init__(self, line: Redis, wake_key: str, on_end: Callable[[Shard, asyncio.Task[None]], None]) -> None:
        self._line = line
        self._wake_key = wake_key
        self._on_end = on_end
        self._by_key: dict[str, set[Subscription]] = {}
        self._issued: Mapping[str, EntryId] | None = None  # what the read that is blocked now asks for
        self._call: asyncio.Task[Any] | None = None  # that read
        self._changed = asyncio.Event()
        self._wakes = 0
        self._seen_wake = 0
        self._waking: asyncio.Task[None] | None = None
        self._task = asyncio.get_running_loop().create_task(self._run(), name="inferq-reader")

    @property
    def num_keys(self) -> int:
        return len(self._by_key)

    def watches(self, key: str) -> bool:
        return key in self._by_key

    def add(self, subscription: Subscription) -> None:
        self._by_key.setdefault(subscription.key, set()).add(subscription)

    def remove(self, subscription: Subscription) -> None:
        subscribers = self._by_key[subscription.key]
        subscribers.remove(subscription)
        if not subscribers:
            del self._by_key[subscription.key]
        if not self._by_key:
            self._task.cancel()
            self._on_end(self, self._task)

    def want(self, subscription: Subscription) -> None:
        """See to it that the read asks for what this subscription lacks."""
        self._changed.set()
        if self._lacks(subscription.key, subscription.cursor) and self._waking is None:
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _run(self) -> None:
        backoff = Backoff()
        try:
            while True:
                self._changed.clear()
                wanted = self._wanted()
                if not wanted:
                    await self._changed.wait()
                    continue
                try:
                    answer = await self._read(wanted)
                except LOST:
                    self._tell_all()
                    await asyncio.sleep(backoff.next())
                except RedisError:
                    await self._find_broken(wanted)
                else:
                    backoff.reset()
                    self._hand_out(wanted, answer)
                    await asyncio.sleep(0)  # whoever waited takes its batch, so that the next read asks for its key
        finally:
            if self._waking is not None:
                self._waking.cancel()

    def _wanted(self) -> dict[str, EntryId]:
        """Each key that somebody has room for, and the earliest cursor that is wanted of it."""
        cursors = (
            (key, [each.cursor for each in subscribers if each.wanted]) for key, subscribers in self._by_key.items()
        )
        return {key: min(wanted) for key, wanted in cursors if wanted}

    async def _read(self, wanted: Mapping[str, EntryId]) -> list[Any]:
        """Raises what redis-py raises, and TimeoutError when no answer comes."""
        count = max(_LEAST_PER_KEY, min(_ENTRIES_PER_KEY, _ENTRIES_PER_ANSWER // len(wanted)))
        streams: dict[Any, Any] = {self._wake_key: f"{self._seen_wake}-0"} | {
            key: str(cursor) for key, cursor in wanted.items()
        }
        self._call = asyncio.ensure_future(self._line.xread(streams, count=count, block=BLOCK_MS))
        self._issued = wanted
        try:
            await asyncio.wait([self._call], timeout=BLOCK_MS / 1000 + ANSWER_S)
            if not self._call.done():
                raise TimeoutError("no answer to XREAD")
            return [] if self._call.cancelled() else self._call.result()
        finally:
            self._issued = None
            await cancelled(self._call)

    def _lacks(self, key: str, cursor: EntryId) -> bool:
        """Whether a read is blocked that does not ask for what comes after the cursor."""
        if self._issued is None:  # the next read will
            return False
        asked = self._issued.get(key)
        return asked is None or asked > cursor

    async def _wake(self) -> None:
        """End the blocked read, and the one after it if somebody came when that was issued already."""
        try:
            while self._call is not None and any(self._lacks(*each) for each in self._wanted().items()):
                call = self._call
                await self._end(call)
                await asyncio.wait([call])
        finally:
            self._waking = None

    async def _end(self, call: asyncio.Task[Any]) -> None:
        """End one blocked read; if no entry can be written for that, by giving up its connection."""
        self._wakes += 1
        try:
            async with asyncio.timeout(ANSWER_S), self._line.pipeline(transaction=True) as pipe:
                pipe.xadd(self._wake_key, {"w": ""}, id=f"{self._wakes}-0", maxlen=1, approximate=False)
                pipe.pexpire(self._wake_key, _WAKE_TTL_MS)
                await pipe.execute()
        except (RedisError, OSError):
            await cancelled(call)

    def _hand_out(self, asked: Mapping[str, EntryId], answer: list[Any]) -> None:
        for raw_key, entries in answer:
            key = raw_key.decode()
            if key == self._wake_key:
                self._seen_wake = EntryId.parse(entries[-1][0]).epoch
                continue
            for subscription in tuple(self._by_key.get(key, ())):
                subscription.offer(asked[key], entries)

    def _tell_all(self) -> None:
        for subscribers in self._by_key.values():
            for subscription in subscribers:
                subscription.look()

    async def _find_broken(self, wanted: Mapping[str, EntryId]) -> None:
        """One key that is no stream, or may not be read, fails a read of all: its subscribers alone are told."""
        try:
            async with asyncio.timeout(ANSWER_S), self._line.pipeline(transaction=False) as pipe:
                for key, cursor in wanted.items():
                    pipe.xread({key: str(cursor)}, count=1)
                answers = await pipe.execute(raise_on_error=False)
        except (RedisError, OSError):
            answers = []
        broken = [(key, each) for key, each in zip(wanted, answers, strict=False) if isinstance(each, RedisError)]
        for key, error in broken:
            for subscription in self._by_key.get(key, ()):
                subscription.fail(error)
        if not broken:
            self._tell_all()
            await asyncio.sleep(_REFUSED_PAUSE_S)
