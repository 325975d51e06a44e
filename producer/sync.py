"""The client for code without an event loop: Flask, Django, threads, scripts.

Every method is that of `InferenceClient`, run in a background thread that all threads of the process share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

from .background import Background
from .client import InferenceClient
from .commands import CancelOutcome
from .dead_letters import DeadLetter
from .events import StreamEvent
from .fleet import Fleet
from .payload import RequestLike
from .requests import GenerateRequest
from .results import Result, Status
from .signing import SigningKeys
from .stream import EventStream

_Background = Background[InferenceClient]


class SyncEventStream(Iterator[StreamEvent]):
    """The events of one request, as `EventStream` has them, for one thread at a time.

    Leaving a loop over it early needs no more; `close` ends it, also from another thread. A process that is forked goes
    on with a stream of its own, from where this one was.
    """

    def __init__(self, background: _Background, stream: EventStream) -> None:
        self.request_id = stream.request_id
        self._background = background
        self._stream: EventStream | None = stream
        self._pid = os.getpid()
        self._ended = False
        self._position = stream.position
        self._next: Future[tuple[StreamEvent, str] | None] | None = None

    @property
    def position(self) -> str:
        """Right after the event that was yielded last."""
        return self._position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        self._leave_parent()
        if self._next is None:
            self._next = self._background.start(self._read)
        try:
            found = self._background.wait(self._next)
        except KeyboardInterrupt:  # what is on its way is the next one that is asked for
            raise
        except BaseException:
            self._next = None
            raise
        self._next = None
        if found is None:
            raise StopIteration
        event, self._position = found
        return event

    def close(self) -> None:
        """No event comes any more. The position stays."""
        self._ended = True
        self._leave_parent()
        if (stream := self._stream) is not None:
            self._background.run(lambda _: stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def _read(self, client: InferenceClient) -> tuple[StreamEvent, str] | None:
        if self._ended:
            return None
        stream = self._stream = self._stream or client.stream(self.request_id, self._position)
        try:
            return await anext(stream), stream.position
        except StopAsyncIteration:
            self._ended = True
            return None

    def _leave_parent(self) -> None:
        """After a fork: what the parent has reads by its connections, and in its thread."""
        if self._pid != os.getpid():
            self._pid, self._stream, self._next = os.getpid(), None, None


class SyncInferenceClient:
    """A client of the queue that may be shared by any threads, and used after a fork.

    It has connections of its own; see `connect` for what a URL may be, and InferenceClient for the other arguments and
    for what the methods do and raise. The thread begins at the first call and ends at `close`, or with the process.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        prefix: str = "inferq",
        max_backlog: int | None = None,
        signing_keys: SigningKeys | None = None,
    ) -> None:
        make = partial(
            InferenceClient.from_url,
            url,
            model=model,
            prefix=prefix,
            max_backlog=max_backlog,
            signing_keys=signing_keys,
        )
        make()  # what is wrong with the arguments is said here, and not at the first call
        self._background: _Background = Background(make, InferenceClient.aclose)

    @classmethod
    def from_url(cls, url: str | None = None, **options: Any) -> Self:
        """The same as the constructor, as the asynchronous client has it."""
        return cls(url, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Whoever still waits gets RedisUnavailable."""
        self._background.close()

    def submit(self, request: RequestLike | None = None, **options: Any) -> str:
        """Enqueue a request and return its id."""
        return self._background.run(lambda client: client.submit(request, **options))

    def stream(self, request_id: str, position: str = "0") -> SyncEventStream:
        """The events of a request from the start, or from a position that a stream gave."""

        async def opened(client: InferenceClient) -> EventStream:
            return client.stream(request_id, position)

        return SyncEventStream(self._background, self._background.run(opened))

    def result(self, request_id: str, timeout: float | None = None) -> Result:
        """The whole answer, once the request has ended."""
        return self._background.run(lambda client: client.result(request_id, timeout))

    def cancel(self, request_id: str) -> CancelOutcome:
        """Stop a request wherever it is."""
        return self._background.run(lambda client: client.cancel(request_id))

    def status(self, request_id: str) -> Status:
        """How far the request has come."""
        return self._background.run(lambda client: client.status(request_id))

    def fleet(self) -> Fleet:
        """The live workers, and the models that they serve with their backlogs."""
        return self._background.run(lambda client: client.fleet())

    def dead_letters(self, *, model: str | None = None, limit: int = 100) -> list[DeadLetter]:
        """The last jobs of a model that failed for a reason somebody should look into."""
        return self._background.run(lambda client: client.dead_letters(model=model, limit=limit))

    def dead_letter(self, request_id: str, *, model: str | None = None) -> tuple[DeadLetter, GenerateRequest | None]:
        """One of them, and its request unless that has expired."""
        return self._background.run(lambda client: client.dead_letter(request_id, model=model))

    def requeue(self, request_id: str, *, model: str | None = None) -> str:
        """Enqueue the request of a dead letter again, under a new id, which is returned."""
        return self._background.run(lambda client: client.requeue(request_id, model=model))
