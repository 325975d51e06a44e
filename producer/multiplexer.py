"""One blocked read for all the streams that a process watches: XREAD over all their keys, on one connection.

Among the keys is a stream that only this process writes to: an entry there ends the read when it must be issued anew
with other keys. Whoever reads a stream takes one batch at a time, and at most one more is kept for it: until that is
taken its key is not read on, so that a slow consumer holds up nobody. Knows cursors, and nothing of what entries mean.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from redis.exceptions import RedisError

from .connection import blocking_connection
from .contract import Keys, new_request_id
from .position import START, EntryId
from .shard import Shard

if TYPE_CHECKING:
    from arq.connections import ArqRedis
    from redis.asyncio import ConnectionPool, Redis

    from .reader import Entry

#: The cost of a read grows with its keys: above so many, another connection takes the next ones.
KEYS_PER_CONNECTION: Final = 500


class Subscription:
    """One reader's place in a multiplexer, from `subscribe` until `close`."""

    __slots__ = ("_batch", "_error", "_look", "_shard", "_waiter", "closed", "cursor", "key")

    def __init__(self, shard: Shard, key: str, cursor: EntryId) -> None:
        self.key = key
        self.cursor = cursor  #: the entry after which the next batch begins
        self.closed = False
        self._shard = shard
        self._batch: list[Entry] | None = None
        self._error: RedisError | None = None
        self._look = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is room for a batch."""
        return self._batch is None and self._error is None

    async def next(self, cursor: EntryId, timeout_s: float) -> list[Entry]:
        """The entries that one command found after `cursor`, up to some number of them.

        Empty when none came in time, when the connection was lost since the last call, so that the stream should be
        looked at by other means, and after `close`. Raises what Redis said of this stream's key. One caller at a time.
        """
        if cursor != self.cursor:
            self.cursor, self._batch = cursor, None
        if self.wanted and not self._look and not self.closed:
            await self._wait(timeout_s)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        batch, self._batch = self._batch, None
        if batch:
            self.cursor = EntryId.parse(batch[-1][0])
            return batch
        self._look = False
        return []

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._shard.want(self)
        timer = loop.call_later(timeout_s, self._notify)  # a fraction of what asyncio.timeout costs for each event
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def close(self) -> None:
        """Leave. The connection closes with its last subscription."""
        if not self.closed:
            self.closed = True
            self._shard.remove(self)
            self._notify()

    def offer(self, since: EntryId, entries: list[Entry]) -> None:
        """What a command found after `since`; ignored if that does not follow on what this reader has."""
        if not self.wanted or since > self.cursor:
            return
        new = entries if since == self.cursor else [each for each in entries if EntryId.parse(each[0]) > self.cursor]
        if new:
            self._batch = new
            self._notify()

    def fail(self, error: RedisError) -> None:
        self._error = error
        self._notify()

    def look(self) -> None:
        """The connection was lost: what is read next may not follow on what was read before."""
        self._look = True
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Multiplexer:
    """The blocked reads of one process and event loop on one server; a connection for each KEYS_PER_CONNECTION keys.

    One more connection wakes them. All of them are closed when nobody watches a stream.
    """

    def __init__(self, redis: ArqRedis, prefix: str) -> None:
        self._line: Redis = blocking_connection(redis)
        self._prefix = prefix
        self._shards: list[Shard] = []
        self._ending: set[asyncio.Task[None]] = set()

    def subscribe(self, key: str, cursor: EntryId = START.entry) -> Subscription:
        shard = self._shard_of(key)
        subscription = Subscription(shard, key, cursor)
        shard.add(subscription)
        return subscription

    @property
    def num_connections(self) -> int:
        """Connections that wait in a read now."""
        return len(self._shards)

    async def settled(self) -> None:
        """Return when the connections that are no longer needed are closed."""
        while self._ending:
            await asyncio.wait(self._ending)

    def _shard_of(self, key: str) -> Shard:
        watching = [shard for shard in self._shards if shard.watches(key)]
        roomy = (shard for shard in self._shards if shard.num_keys < KEYS_PER_CONNECTION)
        if shard := next(chain(watching, roomy), None):
            return shard
        shard = Shard(self._line, Keys("-", self._prefix).wake(new_request_id()), self._ended)
        self._shards.append(shard)
        return shard

    def _ended(self, shard: Shard, task: asyncio.Task[None]) -> None:
        """The shard has lost its last subscription; its task is letting go of its connection."""
        self._shards.remove(shard)
        closing = asyncio.get_running_loop().create_task(self._close_after(task))
        self._ending.add(closing)
        closing.add_done_callback(self._ending.discard)

    async def _close_after(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait([task])
        if not self._shards:
            await self._line.connection_pool.disconnect(inuse_connections=False)


_OfLoop = WeakKeyDictionary["ConnectionPool", Multiplexer]
_SHARED: Final = WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop]()


def shared_multiplexer(redis: ArqRedis, prefix: str) -> Multiplexer:
    """The multiplexer of the running event loop for this client's server: all that use one pool share it."""
    of_loop = _SHARED.setdefault(asyncio.get_running_loop(), _OfLoop())
    pool = redis.connection_pool
    if pool not in of_loop:
        of_loop[pool] = Multiplexer(redis, prefix)
    return of_loop[pool]
