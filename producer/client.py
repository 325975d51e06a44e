"""What a web app holds: submit a request, read its events from anywhere, cancel it, ask how far it is.

Knows the order of calls; what a request may be, what the queue does and what entries mean stands in the other files.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from .commands import CancelOutcome, ProducerCommands
from .connection import blocking_connection, check_client, connect, redis_errors
from .contract import Keys, is_request_id, new_request_id, served_name
from .errors import InvalidRequest, failure
from .events import Delta, Failed, Finished
from .fleet import Card, Fleet, only_model, read_card, read_fleet
from .payload import RequestLike, build_request, encode_payload, estimate_tokens, fingerprint
from .results import Result, ResultBuilder, Status
from .status import read_status
from .stream import EventStream, StreamSource

if TYPE_CHECKING:
    from arq.connections import ArqRedis

MAX_BACKLOG: Final = 10_000
#: A worker renews its card each 5 s: so long the client goes by what it has read of it.
_CARD_AGE_S: Final = 5.0
#: Names come from callers: so many models are remembered.
_MAX_MODELS: Final = 256
#: For keys of requests and of workers, whose names say nothing of a model.
_ANY_MODEL: Final = "-"


@dataclass(slots=True)
class _Model:
    keys: Keys
    commands: ProducerCommands
    card: Card | None = None
    read_at: float = 0.0

    @property
    def max_backlog(self) -> int:
        return (self.card and self.card.max_backlog) or MAX_BACKLOG


class InferenceClient:
    """A client of the queue, for any number of requests at once; safe to share between tasks of one event loop.

    `redis` is an ArqRedis whose serializers are JSON; it stays the caller's to close. `model` is the served name that
    requests go to which name none; without it $INFERQ_MODEL, else the only model that is served. `max_backlog` bounds
    the jobs that may wait; without it the model's workers say how many. Raises UnsuitableConnection for a client that
    cannot be used, and from every method RedisUnavailable.
    """

    def __init__(
        self,
        redis: ArqRedis,
        *,
        model: str | None = None,
        prefix: str = "inferq",
        max_backlog: int | None = None,
    ) -> None:
        check_client(redis)
        self._redis = redis
        self._owns_redis = False
        self._model = _model_of_environment() if model is None else model
        self._max_backlog = max_backlog
        self._blocking = blocking_connection(redis)
        self._keys = self._keys_of(self._model or _ANY_MODEL, prefix)
        commands = ProducerCommands(redis, self._keys)  # cancel and expire go by the job's own model
        self._source = StreamSource(redis, self._blocking, self._keys, commands)
        self._models: dict[str, _Model] = {}
        self._only_model: tuple[str, float] | None = None

    @classmethod
    def from_url(
        cls,
        url: str | None = None,
        *,
        model: str | None = None,
        prefix: str = "inferq",
        max_backlog: int | None = None,
    ) -> Self:
        """A client with connections of its own; see `connect` for what a URL may be. None: $INFERQ_REDIS_URL."""
        client = cls(connect(url), model=model, prefix=prefix, max_backlog=max_backlog)
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
        self._source.closed = True
        await self._blocking.aclose()
        if self._owns_redis:
            await self._redis.aclose()

    async def submit(self, request: RequestLike | None = None, *, request_id: str | None = None, **fields: Any) -> str:
        """Enqueue a request and return its id.

        `request` is a text to go on from, a GenerateRequest or a mapping with its fields; or pass the fields, such
        as `messages=`, `prompt_token_ids=` and `sampling=`, by name. `request_id` is drawn if not given; while a job
        of that id lives another cannot begin.

        Raises InvalidRequest before anything is written, UnknownModel, DuplicateRequest, and QueueFull.
        """
        job = build_request(request, **fields)
        if request_id is None:
            request_id = new_request_id()
        _check_id(request_id)
        with redis_errors():
            served = await self._served(job.model or self._model or await self._only_served())
            if served.card is not None:
                served.card.check(job)
            await served.commands.enqueue(
                request_id,
                encode_payload(job),
                deadline_ms=job.deadline_ms,
                priority=job.priority,
                tenant=job.tenant,
                trace=job.trace,
                fingerprint=fingerprint(job),
                estimate=estimate_tokens(job),
                max_backlog=served.max_backlog if self._max_backlog is None else self._max_backlog,
            )
        return request_id

    def stream(self, request_id: str, position: str = "0") -> EventStream:
        """The events of a request from the start, or from a position that an EventStream gave; any number of readers.

        Raises InvalidRequest for an id or a position that cannot be one.
        """
        _check_id(request_id)
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
        _check_id(request_id)
        with redis_errors():
            return await self._source.commands.cancel(request_id)

    async def status(self, request_id: str) -> Status:
        """How far the request has come."""
        _check_id(request_id)
        with redis_errors():
            return await read_status(self._redis, self._keys, request_id)

    async def fleet(self) -> Fleet:
        """The live workers, and the models that they serve with their backlogs."""
        with redis_errors():
            return await read_fleet(self._redis, self._keys, [self._model] if self._model else [])

    async def _only_served(self) -> str:
        now = asyncio.get_running_loop().time()
        if self._only_model is None or now - self._only_model[1] > _CARD_AGE_S:
            self._only_model = await only_model(self._redis, self._keys), now
        return self._only_model[0]

    async def _served(self, name: str) -> _Model:
        if name not in self._models:
            if len(self._models) >= _MAX_MODELS:
                self._models.clear()
            keys = self._keys_of(name, self._keys.prefix)
            self._models[name] = _Model(keys, ProducerCommands(self._redis, keys))
        model = self._models[name]
        now = asyncio.get_running_loop().time()
        if model.card is None or now - model.read_at > _CARD_AGE_S:
            model.card, model.read_at = await read_card(self._redis, model.keys), now
        return model

    @staticmethod
    def _keys_of(model: str, prefix: str) -> Keys:
        try:
            return Keys(model, prefix)
        except ValueError as exc:
            raise InvalidRequest(str(exc)) from None


def _check_id(request_id: str) -> None:
    if not isinstance(request_id, str) or not is_request_id(request_id):
        raise InvalidRequest("request_id must have 1 to 64 characters, each a letter, a digit, _ or -")


def _model_of_environment() -> str | None:
    """Workers take a folder or a repository from the same variable, and serve it under its last part."""
    model = os.environ.get("INFERQ_MODEL")
    return served_name(model) if model else None
