"""Reading the stream of one request: an async iterator of its events that survives a lost connection.

Does the I/O for `reader.py`, which decides what the entries mean. What comes is waited for together with the streams
of all others (`multiplexer.py`); at the beginning, and whenever nothing came for a while, the stream and its job are
looked at directly.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from redis.exceptions import NoPermissionError, RedisError

from .cancellation import cancellable
from .connection import LOST, is_refusal, unavailable
from .contract import Keys
from .errors import InferqError, JobLost, RedisUnavailable, UnknownRequest
from .events import NoWorker, Started, StreamEvent
from .look import Look, find_no_worker, look_at
from .multiplexer import Subscription, shared_multiplexer
from .position import Position
from .presence import Presence
from .reader import Entry, Item, StreamReader
from .shard import ANSWER_S, BLOCK_MS

if TYPE_CHECKING:
    from arq.connections import ArqRedis

    from .commands import ProducerCommands

_ENTRIES_PER_READ: Final = 500
#: So many streams of a client may look at once: their number must not become a number of connections.
_LOOKS: Final = 4
#: A server that cannot be reached for so long is given up.
PATIENCE_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(slots=True)
class StreamSource:
    """What the streams of a client are read with."""

    redis: ArqRedis
    keys: Keys
    commands: ProducerCommands
    #: So long a stream waits for entries: as long as a lease, after which the job may need somebody to end it.
    block_ms: int = BLOCK_MS
    answer_s: float = ANSWER_S
    patience_s: float = PATIENCE_S
    closed: bool = False
    #: False once Redis has said that this user may only read. Then it is for others to end a job that is due.
    may_write: bool = True
    presence: Presence = field(init=False)
    looks: asyncio.Semaphore = field(init=False)
    open: weakref.WeakSet[_Held] = field(init=False)

    def __post_init__(self) -> None:
        self.presence = Presence(self.commands)
        self.looks = asyncio.Semaphore(_LOOKS)
        self.open = weakref.WeakSet()

    async def expire(self, request_id: str) -> None:
        """End the job if it is due and nobody runs it."""
        if self.may_write:
            try:
                await self.commands.expire(request_id=request_id)
            except NoPermissionError:
                self.may_write = False

    async def aclose(self) -> None:
        """End every stream. Returns when no connection waits for them any more."""
        self.closed = True
        for held in tuple(self.open):
            held.release()
        await shared_multiplexer(self.redis, self.keys.prefix).settled()


class _Held:
    """What an open stream occupies, apart from the stream itself, so that it is freed when the stream is forgotten."""

    def __init__(self, source: StreamSource, request_id: str) -> None:
        self._source = source
        self._request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._present = False
        multiplexer = shared_multiplexer(source.redis, source.keys.prefix)
        self.subscription: Subscription = multiplexer.subscribe(source.keys.events(request_id))
        source.open.add(self)

    async def be_present(self) -> None:
        if not self._present and self._source.may_write:
            self._present = True
            try:
                await self._source.presence.enter(self._request_id)
            except NoPermissionError:
                self._source.may_write = False
                self._be_absent()

    def release(self) -> None:
        self.subscription.close()
        self._be_absent()

    def _be_absent(self) -> None:
        if self._present:
            self._present = False
            self._source.presence.leave(self._request_id)

    def release_soon(self) -> None:
        """From any thread, as the garbage collector may call it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.release)


class EventStream(AsyncIterator[StreamEvent]):
    """The events of one request from a position on; it ends after the terminal event.

    `position` is right after the event that was yielded last: a stream opened there, by any process, yields exactly
    the rest. One consumer at a time. Among the events is a `NoWorker` each time that the request is found waiting
    while no live worker serves its model. Raises UnknownRequest, JobLost or RequestReplaced, and RedisUnavailable when
    the server cannot be reached for a minute.
    """

    def __init__(self, source: StreamSource, request_id: str, position: str = "0") -> None:
        self.request_id = request_id
        self._source = source
        self._key = source.keys.events(request_id)
        self._position = Position.parse(position)
        self._reader = StreamReader(request_id, self._position)
        self._items: Iterator[Item] = iter(())
        self._held: _Held | None = None
        self._seen = False  # whether the stream was ever there
        self._waiting = False  # whether a job without a stream was there
        self._looked = False  # whether the stream was looked at since the last time that nothing came
        self._notice: NoWorker | None = None
        self._noticed = False
        self._deadline: float | None = None  # by the loop's clock
        self._after_deadline = False  # whether the last look came after it
        self._closed = False

    @property
    def position(self) -> str:
        return str(self._position)

    @property
    def _is_over(self) -> bool:
        return self._closed or self._source.closed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        try:
            while not self._closed:
                if item := next(self._items, None):
                    self._position = item.position
                    self._noticed = self._noticed and not isinstance(item.event, Started)
                    return item.event
                if notice := self._notice:
                    self._notice, self._noticed = None, True
                    return notice
                if self._reader.done:
                    break
                self._items = self._reader.feed(await self._read_patiently())
        except InferqError:
            self._end()
            raise
        self._end()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """No event comes any more. The position stays."""
        self._end()

    def _end(self) -> None:
        self._closed = True
        if self._held is not None:
            self._held.release()
            self._held = None

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
        while not self._is_over:
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
        if self._closed:
            return []
        raise RedisUnavailable("the client is closed")

    async def _read(self) -> list[Entry]:
        if not self._looked:
            entries = await self._look()
            if entries or not self._looked or self._reader.done or self._notice:
                return entries
        entries = await self._wait_for_entries()
        if not entries or self._reader.rereading:  # one command must read the whole stream
            self._looked = False
            return []
        self._seen = True
        return entries

    async def _wait_for_entries(self) -> list[Entry]:
        if self._is_over:  # since the stream was looked at
            return []
        wait_s = self._source.block_ms / 1000
        if self._deadline is not None:
            wait_s = max(0.0, min(wait_s, self._deadline - asyncio.get_running_loop().time() + 0.001))
        entries = await self._hold().subscription.next(self._reader.cursor, wait_s)
        if not entries and not self._is_over:
            async with asyncio.timeout(self._source.answer_s), self._source.looks:
                await cancellable(self._source.expire(self.request_id))
        return entries

    def _hold(self) -> _Held:
        if self._held is None:
            self._held = _Held(self._source, self.request_id)
            weakref.finalize(self, self._held.release_soon).atexit = False
        return self._held

    async def _look(self) -> list[Entry]:
        """See what the stream holds after the cursor, whether it ends before it, and how its job is."""
        source, cursor = self._source, self._reader.cursor
        count = None if self._reader.rereading else _ENTRIES_PER_READ
        async with asyncio.timeout(source.answer_s), source.looks:
            look = await cancellable(look_at(source.redis, source.keys, self.request_id, cursor, count))
            if not self._noticed:
                self._notice = await cancellable(find_no_worker(source.redis, source.keys, look))
        self._set_deadline(look.left_s)
        self._see(look)
        if look.ends_unread and not self._is_over:
            await cancellable(self._hold().be_present())
        self._looked = self._reader.cursor == cursor  # or else the stream is to be read again
        return look.entries if self._looked else []

    def _set_deadline(self, left_s: float | None) -> None:
        """A deadline that has passed is worth one look at once; after it, whoever runs the job ends it."""
        passed = left_s is not None and left_s <= 0
        if left_s is None or (passed and self._after_deadline):
            self._deadline = None
        else:
            self._deadline = asyncio.get_running_loop().time() + max(0.0, left_s)
        self._after_deadline = passed

    def _see(self, look: Look) -> None:
        """Raises UnknownRequest or JobLost if there is nothing to wait for."""
        if look.last or self._seen:
            self._reader.tail(look.last)
            self._seen = True
        elif look.has_payload:  # a plain arq producer's job has no stream before a worker takes it
            self._waiting = True
        else:
            lost = JobLost("the job was gone before a worker took it")
            raise lost if self._waiting else UnknownRequest(f"nothing is known under the id {self.request_id}")
