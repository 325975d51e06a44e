"""From a validated request to an accepted job: which model it goes to, what its id is, what the model's card allows.

Knows the cards and the enqueue command; what a request may be is decided before.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from .commands import WEIGHTS, ProducerCommands
from .contract import Keys, is_request_id, new_request_id
from .durable import enqueue_durably
from .errors import InvalidRequest
from .fleet import Card, only_model, read_card
from .payload import encode_payload, estimate_tokens, fingerprint

if TYPE_CHECKING:
    from arq.connections import ArqRedis
    from redis.asyncio import Redis

    from .commands import Enqueued
    from .dead_letters import DeadLetter
    from .requests import GenerateRequest
    from .signing import SigningKeys

MAX_BACKLOG: Final = 10_000
MAX_IDEMPOTENCY_KEY_CHARS: Final = 256
#: A worker renews its card each 5 s: so long the client goes by what it has read of it.
_CARD_AGE_S: Final = 5.0
#: Names come from callers: so many models are remembered.
_MAX_MODELS: Final = 256


@dataclass(slots=True)
class _Model:
    keys: Keys
    commands: ProducerCommands
    card: Card | None = None
    read_at: float = 0.0

    @property
    def max_backlog(self) -> int:
        return (self.card and self.card.max_backlog) or MAX_BACKLOG


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On what terms a request is submitted."""

    request_id: str | None = None
    idempotency_key: str | None = None
    cancel_on_disconnect: bool = False
    weight: float = 1.0  #: of its tenant, in the order
    durable_timeout_s: float | None = None  #: None: without waiting for disk or replica

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if self.request_id is not None:
            check_id(self.request_id)
        least, most = WEIGHTS
        if not isinstance(self.weight, int | float) or not least <= self.weight <= most:
            raise InvalidRequest(f"weight must be a number from {least} to {most}")
        if self.idempotency_key is None:
            return
        if self.request_id is not None:
            raise InvalidRequest("give request_id or idempotency_key, not both: the id follows from the key")
        key = self.idempotency_key
        if not isinstance(key, str) or not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY_CHARS or not _is_unicode(key):
            raise InvalidRequest(f"idempotency_key must be a text of 1 to {MAX_IDEMPOTENCY_KEY_CHARS} characters")


class Submitter:
    """Enqueues requests. `model` is the served name for requests that name none; None: the only one that is served.

    With `signing_keys` every job is signed, and a dead letter is enqueued again only if it was.
    """

    def __init__(
        self,
        redis: ArqRedis,
        blocking: Redis,
        prefix: str,
        *,
        model: str | None,
        max_backlog: int | None,
        signing_keys: SigningKeys | None,
    ) -> None:
        self._redis = redis
        self._blocking = blocking
        self._prefix = prefix
        self._model = model
        self._max_backlog = max_backlog
        self._signing_keys = signing_keys
        self._models: dict[str, _Model] = {}
        self._only_model: tuple[str, float] | None = None

    async def submit(self, job: GenerateRequest, terms: Terms) -> str:
        """Enqueue the job and return its id. Raises what the client's `submit` raises, and redis-py's errors."""
        served = await self._model_of(job.model)
        if served.card is not None:
            served.card.check(job)
        request_id = terms.request_id or new_request_id()
        if terms.idempotency_key is not None:
            request_id = idempotent_id(job.tenant, served.keys.model, terms.idempotency_key)
        enqueue = partial(self._enqueue, served, request_id, job, terms)
        if terms.durable_timeout_s is None:
            await enqueue(served.commands)
        else:
            timeout_s = terms.durable_timeout_s
            await enqueue_durably(self._blocking, served.keys, request_id, enqueue, timeout_s=timeout_s)
        return request_id

    async def dead_list(self, model: str | None, limit: int) -> list[DeadLetter]:
        """The last dead letters of a model, the latest first."""
        return await (await self._model_of(model)).commands.dead_list(limit)

    async def dead_show(self, model: str | None, request_id: str) -> tuple[DeadLetter, bytes | None]:
        """One of them, and its payload unless that has expired."""
        return await (await self._model_of(model)).commands.dead_show(request_id)

    async def dead_requeue(self, model: str | None, request_id: str) -> str:
        """Enqueue the request of a dead letter again, under a new id, which is returned. Raises Unsigned."""
        served = await self._model_of(model)
        new_request = new_request_id()
        max_backlog = served.max_backlog if self._max_backlog is None else self._max_backlog
        await served.commands.dead_requeue(
            request_id, new_request, max_backlog=max_backlog, signing_keys=self._signing_keys
        )
        return new_request

    async def _model_of(self, name: str | None) -> _Model:
        """The model of that name, else the one that requests go to which name none."""
        return await self._served(name or self._model or await self._only_served())

    async def _enqueue(
        self, served: _Model, request_id: str, job: GenerateRequest, terms: Terms, commands: ProducerCommands
    ) -> Enqueued:
        payload, signing = encode_payload(job), self._signing_keys
        return await commands.enqueue(
            request_id,
            payload,
            deadline_ms=job.deadline_ms,
            priority=job.priority,
            tenant=job.tenant,
            trace=job.trace,
            fingerprint=fingerprint(job),
            estimate=estimate_tokens(job),
            max_backlog=served.max_backlog if self._max_backlog is None else self._max_backlog,
            idempotent=terms.idempotency_key is not None,
            cancel_on_disconnect=terms.cancel_on_disconnect,
            weight=terms.weight,
            signature=signing.sign(request_id, queue=served.keys.queue, payload=payload) if signing else "",
        )

    async def _only_served(self) -> str:
        now = asyncio.get_running_loop().time()
        if self._only_model is None or now - self._only_model[1] > _CARD_AGE_S:
            self._only_model = await only_model(self._redis, Keys("-", self._prefix)), now
        return self._only_model[0]

    async def _served(self, name: str) -> _Model:
        if name not in self._models:
            if len(self._models) >= _MAX_MODELS:
                self._models.clear()
            keys = keys_of(name, self._prefix)
            self._models[name] = _Model(keys, ProducerCommands(self._redis, keys))
        model = self._models[name]
        now = asyncio.get_running_loop().time()
        if model.card is None or now - model.read_at > _CARD_AGE_S:
            model.card, model.read_at = await read_card(self._redis, model.keys), now
        return model


def idempotent_id(tenant: str, model: str, key: str) -> str:
    """The request id of an idempotency key: SHA-256 of the three as netstrings, the first 32 hexadecimal digits."""
    parts = (part.encode() for part in (tenant, model, key))
    return hashlib.sha256(b"".join(b"%d:%b," % (len(part), part) for part in parts)).hexdigest()[:32]


def check_id(request_id: str) -> None:
    """Raises InvalidRequest."""
    if not isinstance(request_id, str) or not is_request_id(request_id):
        raise InvalidRequest("request_id must have 1 to 64 characters, each a letter, a digit, _ or -")


def keys_of(model: str, prefix: str) -> Keys:
    """Raises InvalidRequest for names that cannot be."""
    try:
        return Keys(model, prefix)
    except ValueError as exc:
        raise InvalidRequest(str(exc)) from None


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogate, which cannot be written as UTF-8."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
