"""What a web app holds: submit a request, read its events from anywhere, cancel it, ask how far it is.

Knows the order of calls; what a request may be, what the queue does and what entries mean stands in the other files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from .cancellation import cancellable
from .commands import CancelOutcome, ProducerCommands
from .connection import blocking_connection, check_client, connect, redis_errors
from .contract import served_name
from .dead_letters import DeadLetter, request_of
from .errors import failure
from .events import Delta, Failed, Finished
from .fleet import Fleet, read_fleet
from .payload import RequestLike, build_request
from .requests import GenerateRequest
from .results import Result, ResultBuilder, Status
from .signing import SigningKeys, keys_of_environment
from .status import read_status
from .stream import EventStream, StreamSource
from .submission import Submitter, Terms, check_id, keys_of

if TYPE_CHECKING:
    from arq.connections import ArqRedis

T = TypeVar("T")

#: How long a durable submission waits for the disk, and for a replica.
DURABLE_TIMEOUT_S: Final = 5.0
#: For keys of requests and of workers, whose names say nothing of a model.
_ANY_MODEL: Final = "-"


class InferenceClient:
    """A client of the queue, for any number of requests at once; safe to share between tasks of one event loop.

    `redis` is an ArqRedis whose serializers are JSON; it stays the caller's to close. `model` is the served name that
    requests go to which name none; without it $INFERQ_MODEL, else the only model that is served. `max_backlog` bounds
    the jobs that may wait; without it the model's workers say how many. With `signing_keys`, or those of
    $INFERQ_SIGNING_KEY or of the file $INFERQ_SIGNING_KEY_FILE, jobs are signed. Raises UnsuitableConnection for a
    client that cannot be used, InvalidSigningKey, and from every method RedisUnavailable.
    """

    def __init__(
        self,
        redis: ArqRedis,
        *,
        model: str | None = None,
        prefix: str = "inferq",
        max_backlog: int | None = None,
        signing_keys: SigningKeys | None = None,
    ) -> None:
        check_client(redis)
        self._redis = redis
        self._owns_redis = False
        self._model = _model_of_environment() if model is None else model
        self._keys = keys_of(self._model or _ANY_MODEL, prefix)
        self._blocking = blocking_connection(redis)
        self._submitter = Submitter(
            redis,
            self._blocking,
            prefix,
            model=self._model,
            max_backlog=max_backlog,
            signing_keys=signing_keys or keys_of_environment(),
        )
        commands = ProducerCommands(redis, self._keys)  # cancel and expire go by the job's own model
        self._source = StreamSource(redis, self._keys, commands)

    @classmethod
    def from_url(
        cls,
        url: str | None = None,
        *,
        model: str | None = None,
        prefix: str = "inferq",
        max_backlog: int | None = None,
        signing_keys: SigningKeys | None = None,
    ) -> Self:
        """A client with connections of its own; see `connect` for what a URL may be. None: $INFERQ_REDIS_URL."""
        client = cls(connect(url), model=model, prefix=prefix, max_backlog=max_backlog, signing_keys=signing_keys)
        client._owns_redis = True
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection that this client opened."""
        await self._source.aclose()
        await self._blocking.aclose()
        if self._owns_redis:
            await self._redis.aclose()

    async def submit(
        self,
        request: RequestLike | None = None,
        *,
        request_id: str | None = None,
        idempotency_key: str | None = None,
        cancel_on_disconnect: bool = False,
        weight: float = 1.0,
        durable: bool = False,
        durable_timeout: float = DURABLE_TIMEOUT_S,
        **fields: Any,
    ) -> str:
        """Enqueue a request and return its id.

        `request` is a text to go on from, a GenerateRequest or a mapping with its fields; or pass the fields, such
        as `messages=`, `prompt_token_ids=` and `sampling=`, by name. `request_id` is drawn if not given; while a job
        of that id lives another cannot begin. With an `idempotency_key` (a tenant's own, for one model) the request is
        enqueued once, and its id is returned each time, as long as its stream stands.

        Tenants that wait get their shares of what is served by `weight`, from 0.01 to 100. With `cancel_on_disconnect`
        the request is cancelled some 30 seconds after the last `stream` or `result` that followed it has gone, once
        there has been one. With `durable` this returns when the job is on the server's disk and, if it has any, on a
        replica, each within `durable_timeout` seconds.

        Raises InvalidRequest before anything is written, UnknownModel, DuplicateRequest, IdempotencyConflict,
        QueueFull, and NotDurable.
        """
        job = build_request(request, **fields)
        terms = Terms(
            request_id=request_id,
            idempotency_key=idempotency_key,
            cancel_on_disconnect=cancel_on_disconnect,
            weight=weight,
            durable_timeout_s=durable_timeout if durable else None,
        )
        return await _asked(self._submitter.submit(job, terms))

    def stream(self, request_id: str, position: str = "0") -> EventStream:
        """The events of a request from the start, or from a position that an EventStream gave; any number of readers.

        Raises InvalidRequest for an id or a position that cannot be one.
        """
        check_id(request_id)
        return EventStream(self._source, request_id, position)

    async def result(self, request_id: str, timeout: float | None = None) -> Result:
        """The whole answer, once the request has ended; also if it was cancelled or its deadline passed.

        Raises the RequestFailed that a `failed` event stands for, TimeoutError after `timeout` seconds, and what
        reading a stream raises.
        """
        answer = ResultBuilder()
        async with asyncio.timeout(timeout), self.stream(request_id) as events:
            async for event in events:
                match event:
                    case Delta():
                        answer.add(event)
                    case Failed():
                        raise failure(request_id, event)
                    case Finished():
                        choices = answer.choices(event.finish_reasons)
                        return Result(request_id, choices, event.usage, event.timings)
        raise AssertionError("a stream ends with a terminal event")

    async def cancel(self, request_id: str) -> CancelOutcome:
        """Stop a request wherever it is. A running one ends a little later, with `finished(cancelled)`."""
        check_id(request_id)
        return await _asked(self._source.commands.cancel(request_id))

    async def status(self, request_id: str) -> Status:
        """How far the request has come."""
        check_id(request_id)
        return await _asked(read_status(self._redis, self._keys, request_id))

    async def dead_letters(self, *, model: str | None = None, limit: int = 100) -> list[DeadLetter]:
        """The last jobs of a model that failed for a reason somebody should look into, the latest first."""
        return await _asked(self._submitter.dead_list(model, limit))

    async def dead_letter(
        self, request_id: str, *, model: str | None = None
    ) -> tuple[DeadLetter, GenerateRequest | None]:
        """One of them, and its request unless that has expired. Raises UnknownRequest."""
        check_id(request_id)
        letter, payload = await _asked(self._submitter.dead_show(model, request_id))
        return letter, request_of(payload) if payload else None

    async def requeue(self, request_id: str, *, model: str | None = None) -> str:
        """Enqueue the request of a dead letter again, under a new id, which is returned; the letter is removed.

        A client with signing keys raises Unsigned for a letter that is not signed by one of them. Raises UnknownRequest
        without such a letter or when its request has expired, and what `submit` raises.
        """
        check_id(request_id)
        return await _asked(self._submitter.dead_requeue(model, request_id))

    async def fleet(self) -> Fleet:
        """The live workers, and the models that they serve with their backlogs."""
        return await _asked(read_fleet(self._redis, self._keys, [self._model] if self._model else []))


async def _asked(work: Coroutine[Any, Any, T]) -> T:
    with redis_errors():
        return await cancellable(work)


def _model_of_environment() -> str | None:
    """Workers take a folder or a repository from the same variable, and serve it under its last part."""
    model = os.environ.get("INFERQ_MODEL")
    return served_name(model) if model else None
