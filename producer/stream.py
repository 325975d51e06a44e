"""Reading the stream of one request: an async iterator of its events that survives a lost connection.

Does the I/O for `reader.py`, which decides what the entries mean. A connection is held during a read only, so that an
iterator that nobody goes on with holds nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, cast

from redis.exceptions import RedisError

from .connection import LOST, is_refusal, unavailable
from .errors import InferqError, JobLost, RedisUnavailable, UnknownRequest
from .events import Event
from .position import Position
from .reader import Entry, Item, StreamReader

if TYPE_CHECKING:
    from arq.connections import ArqRedis
    from redis.asyncio import Redis

    from .commands import ProducerCommands
    from .contract import Keys

#: How long one read waits for entries: as long as a lease, after which the job may need somebody to end it.
BLOCK_MS: Final = 5000
#: An answer that is later than this is not coming: the connection is half open.
ANSWER_S: Final = 3.0
_ENTRIES_PER_READ: Final = 500
#: A server that cannot be reached for so long is given up.
PATIENCE_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(slots=True)
class StreamSource:
    """What streams are read with: a client for commands, one for reads that block, and the scripts."""

    redis: ArqRedis
    blocking: Redis
    keys: Keys
    commands: ProducerCommands
    block_ms: int = BLOCK_MS
    answer_s: float = ANSWER_S
    patience_s: float = PATIENCE_S
    closed: bool = False


class EventStream(AsyncIterator[Event]):
    """The events of one request from a position on; it ends after the terminal event.

    `position` is right after the event that was yielded last: a stream opened there, by any process, yields exactly
    the rest. One consumer at a time. Raises UnknownRequest, JobLost or RequestReplaced, and RedisUnavailable when the
    server cannot be reached for a minute.
    """

    def __init__(self, source: StreamSource, request_id: str, position: str = "0") -> None:
        self.request_id = request_id
        self._source = source
        self._key = source.keys.events(request_id)
        self._position = Position.parse(position)
        self._reader = StreamReader(request_id, self._position)
        self._items: Iterator[Item] = iter(())
        self._seen = False  # whether the stream was ever there
        self._waiting = False  # whether a job without a stream was there
        self._looked = False  # whether the stream's end was looked at since the connection was made
        self._deadline: float | None = None  # by the loop's clock
        self._after_deadline = False  # whether the last look came after it
        self._closed = False

    @property
    def position(self) -> str:
        return str(self._position)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            while not self._closed:
                if item := next(self._items, None):
                    self._position = item.position
                    return item.event
                if self._reader.done:
                    break
                self._items = self._reader.feed(await self._read_patiently())
        except InferqError:
            self._closed = True
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """No event comes any more. The position stays."""
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _read_patiently(self) -> list[Entry]:
        """Read until the server answers. What fails does not change where the reader is."""
        clock = asyncio.get_running_loop().time
        pause, failing_since = _FIRST_PAUSE_S, None
        while not self._source.closed:
            try:
                return await self._read()
            except LOST as exc:
                self._looked = False
                failing_since = failing_since or clock()
                if is_refusal(exc) or clock() - failing_since > self._source.patience_s:
                    raise unavailable(exc) from exc
            except RedisError as exc:
                raise unavailable(exc) from exc
            await asyncio.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise RedisUnavailable("the client is closed")

    async def _read(self) -> list[Entry]:
        if not self._looked:
            await self._look()
            self._looked = True
            if self._reader.done:
                return []
        entries = await self._wait_for_entries()
        if entries:
            self._seen = True
        else:
            async with asyncio.timeout(self._source.answer_s):
                await self._source.commands.expire(request_id=self.request_id)
            await self._look()
        return entries

    async def _wait_for_entries(self) -> list[Entry]:
        block_ms = self._source.block_ms
        if self._deadline is not None:
            left_s = self._deadline - asyncio.get_running_loop().time()
            block_ms = min(block_ms, max(1, round(left_s * 1000) + 1))
        count = None if self._reader.rereading else _ENTRIES_PER_READ
        async with asyncio.timeout(block_ms / 1000 + self._source.answer_s):
            answer = await self._source.blocking.xread(
                {self._key: str(self._reader.cursor)}, count=count, block=block_ms
            )
        return cast("list[Entry]", answer[0][1]) if answer else []

    async def _look(self) -> None:
        """See whether the stream is still there, whether it ends behind the reader, and when its deadline is."""
        keys = self._source.keys
        async with asyncio.timeout(self._source.answer_s), self._source.redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.xrevrange(self._key, count=1)
            pipe.hget(keys.job(self.request_id), "expires_at_ms")
            pipe.exists(keys.payload(self.request_id))
            (seconds, micros), last, expires_at_ms, has_payload = await pipe.execute()
        if last or self._seen:
            self._reader.tail(last[0] if last else None)
            self._seen = True
        elif has_payload:  # a plain arq producer's job has no stream before a worker takes it
            self._waiting = True
        else:
            lost = JobLost("the job was gone before a worker took it")
            raise lost if self._waiting else UnknownRequest(f"nothing is known under the id {self.request_id}")
        left_ms = float(expires_at_ms or 0) - (seconds * 1000 + micros / 1000)
        passed = expires_at_ms is not None and left_ms <= 0
        # A deadline that has passed is worth one look at once; after it, whoever runs the job ends it.
        if expires_at_ms is None or (passed and self._after_deadline):
            self._deadline = None
        else:
            self._deadline = asyncio.get_running_loop().time() + max(0.0, left_ms) / 1000
        self._after_deadline = passed
