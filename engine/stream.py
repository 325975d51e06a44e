"""The stream of one request's deltas: a sending end that the tracker holds, a receiving end that the user holds.

A reader learns one of four things: a delta, nothing yet, a good end, or an error (the request's failure, or that the
stream was closed by its own reader). The two ends are two objects so that a receiving end that nobody holds any more
is collected, which aborts its request. Standard library only; knows neither the tracker nor the pipe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, Self

from .errors import EngineError
from .request import Completion, Delta, FinishReason

#: Above so many unread tokens a request is paused, and at so many or fewer it goes on.
HIGH_WATER_TOKENS: Final = 256
LOW_WATER_TOKENS: Final = 64


class Sink(Protocol):
    """Where a request's output goes: some deltas, then one end. Called from the event loop, and must not block."""

    def put(self, delta: Delta) -> None:
        """The last delta carries its finish_reason. What this raises ends the request, and comes back as `fail`."""

    def fail(self, error: EngineError) -> None:
        """The other end: the request failed, and nothing follows."""


class EndOfStream(Exception):
    """The request has finished, and its last delta was read."""


class StreamClosedError(EngineError):
    """The stream was closed by its reader."""


@dataclass(frozen=True, slots=True)
class StreamControl:
    """What a stream may ask for its request."""

    abort: Callable[[], object]
    pause: Callable[[], object]
    resume: Callable[[], object]


class _Channel:
    """What the two ends share: unread deltas, how the stream ended, and who waits for the next."""

    def __init__(self, control: StreamControl) -> None:
        self.control = control
        self.unread: deque[Delta] = deque()
        self.num_unread_tokens = 0
        self.finished = False
        self.error: EngineError | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.paused = False
        self.num_prompt_tokens = 0

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class StreamSink:
    """The sending end. After an end it takes nothing more."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    def count_prompt(self, num_tokens: int) -> None:
        self._channel.num_prompt_tokens = num_tokens

    def put(self, delta: Delta) -> None:
        channel = self._channel
        if channel.ended:
            return
        channel.unread.append(delta)
        channel.num_unread_tokens += len(delta.token_ids)
        channel.finished = delta.finish_reason is not None
        channel.wake()
        if channel.num_unread_tokens > HIGH_WATER_TOKENS and not channel.paused and not channel.finished:
            channel.paused = True
            channel.control.pause()

    def fail(self, error: EngineError) -> None:
        if not self._channel.ended:
            self._channel.error = error
            self._channel.wake()


class AsyncStream(AsyncIterator[Delta]):
    """The receiving end: iterate over it, from one task at a time.

    A reader that is cancelled while it waits loses nothing: the next one goes on. `aclose`, or letting go of the
    stream before its end, aborts the request.
    """

    def __init__(self, request_id: str, channel: _Channel, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self._channel = channel
        self._loop = loop

    def __repr__(self) -> str:
        channel = self._channel
        return f"<AsyncStream {self.request_id} unread={len(channel.unread)} ended={channel.ended}>"

    def receive_nowait(self) -> Delta | None:
        """The next delta, or None while there is nothing yet.

        Raises EndOfStream after the last delta, the request's EngineError where it failed, StreamClosedError after
        `aclose`, and RuntimeError while another task waits on this stream.
        """
        channel = self._channel
        if channel.waiter is not None:
            raise RuntimeError(f"two tasks read the stream of request {self.request_id!r} at once")
        if channel.unread:
            return self._take()
        if channel.error is not None:
            raise channel.error.with_traceback(None)
        if channel.finished:
            raise EndOfStream
        return None

    def _take(self) -> Delta:
        channel = self._channel
        delta = channel.unread.popleft()
        channel.num_unread_tokens -= len(delta.token_ids)
        if channel.paused and channel.num_unread_tokens <= LOW_WATER_TOKENS and not channel.ended:
            channel.paused = False
            channel.control.resume()
        return delta

    async def __anext__(self) -> Delta:
        channel = self._channel
        try:
            while (delta := self.receive_nowait()) is None:
                # The waiter carries no delta: one that is woken and cancelled at once has taken nothing.
                channel.waiter = self._loop.create_future()
                try:
                    await channel.waiter
                finally:
                    channel.waiter = None
        except EndOfStream:
            raise StopAsyncIteration from None
        return delta

    async def collect(self) -> Completion:
        """What is left of the stream, as one answer. Raises the request's own EngineError."""
        texts: list[str] = []
        token_ids: list[int] = []
        finish_reason: FinishReason | None = None
        async for delta in self:
            texts.append(delta.text)
            token_ids += delta.token_ids
            finish_reason = delta.finish_reason
        if finish_reason is None:
            raise StreamClosedError(f"the stream of request {self.request_id!r} was read to its end before")
        num_prompt_tokens = self._channel.num_prompt_tokens
        return Completion(self.request_id, "".join(texts), tuple(token_ids), finish_reason, num_prompt_tokens)

    async def aclose(self) -> None:
        """Abort the request unless it has ended, and drop what was not read. May be called again."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        channel = self._channel
        live = not channel.ended
        channel.unread.clear()
        channel.num_unread_tokens = 0
        channel.error = StreamClosedError(f"the stream of request {self.request_id!r} was closed by its reader")
        channel.wake()
        if live:
            channel.control.abort()

    def __del__(self) -> None:
        # Collected in any thread, perhaps after the loop was closed: the abort goes through the loop's own queue.
        if not self._channel.ended:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._channel.control.abort)


def open_stream(request_id: str, control: StreamControl) -> tuple[StreamSink, AsyncStream]:
    """The two ends of a new stream. Called in the event loop that will read it."""
    channel = _Channel(control)
    return StreamSink(channel), AsyncStream(request_id, channel, asyncio.get_running_loop())
