"""What a producer does to the queue, one script a command: enqueue, cancel, expire, and a reader's presence.

Knows the scripts' arguments and answers; what they do stands in the scripts themselves. Dead letters, which are read
more than they are written, have a file of their own.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .contract import Keys
from .dead_letters import DeadLetter, find_dead_letter, read_dead_letters, read_dead_payload, request_of
from .errors import DuplicateRequest, IdempotencyConflict, InvalidRequest, QueueFull, UnknownRequest
from .lua import ScriptRunner
from .payload import estimate_tokens, fingerprint

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from .signing import SigningKeys

_SCRIPTS: Final = Path(__file__).with_name("scripts")
_RETRY_AFTER_SECONDS: Final = (1.0, 60.0)
#: Beyond these, places in the order would not stay below the clock for as long as a queue lives.
WEIGHTS: Final = (0.01, 100.0)


class CancelOutcome(StrEnum):
    UNKNOWN = "unknown"  #: nothing is known under that id; nothing was written
    FINISHED = "finished"  #: it had ended before; nothing was written
    CANCELLED = "cancelled"  #: nobody was running it, so it has ended now
    REQUESTED = "requested"  #: a worker is running it, and will end it


@dataclass(frozen=True, slots=True)
class Enqueued:
    """An accepted job: `position` counts the jobs before it, `entry_id` is that of its `queued` entry.

    `created` is False for an idempotent submission whose job was there before, alive or ended.
    """

    generation: int
    position: int
    entry_id: str
    created: bool = True


class ProducerCommands:
    """The producer's scripts, for one served model."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = ScriptRunner(redis, keys, _SCRIPTS)

    async def enqueue(
        self,
        request_id: str,
        payload: bytes,
        *,
        deadline_ms: int | None,
        priority: int,
        tenant: str,
        trace: str | None,
        fingerprint: str,
        estimate: int,
        max_backlog: int,
        weight: float = 1.0,
        cost: float | None = None,
        choices: int = 1,
        idempotent: bool = False,
        cancel_on_disconnect: bool = False,
        dead: DeadLetter | None = None,
        signature: str = "",
    ) -> Enqueued:
        """Accept the job, or refuse it and leave everything as it was.

        `estimate` is in tokens, and so is `cost`, which is the estimate if it is not given. Tenants get their share
        of the order by cost over `weight`. An `idempotent` job is accepted once: as long as the first of its id lives
        or its stream stands, that is answered, by its fingerprint. `dead` is the dead letter that the job comes from;
        it is removed in the same script. `signature` stands in `:job` for the worker that checks it.

        Raises DuplicateRequest while a job of that id lives, IdempotencyConflict if that is another request than the
        first of an idempotent id, QueueFull at `max_backlog` waiting jobs, UnknownRequest if `dead` is gone,
        InvalidRequest where something else stands under a key of that id, and redis.exceptions.OutOfMemoryError
        when the server is full. A call that the connection sends twice (its reply was lost) is known by its
        `submission` and answered as the first one was, also when the job has ended meanwhile.
        """
        least, most = WEIGHTS
        if not least <= weight <= most:
            raise ValueError(f"weight must be from {least} to {most}, not {weight}")
        submission = uuid.uuid4().hex
        deadline = "" if deadline_ms is None else deadline_ms
        details = (deadline, priority, tenant, trace or "", fingerprint, estimate, max_backlog)
        flags = (int(idempotent), int(cancel_on_disconnect))
        share = (weight, estimate if cost is None else cost, choices)
        source = (dead.request_id, dead.entry_id) if dead else ("", "")
        rest = (*details, *share, *flags, *source, signature)
        answer = await self._scripts.run("enqueue", request_id, payload, submission, *rest)
        return _read_answer(request_id, answer)

    async def cancel(self, request_id: str) -> CancelOutcome:
        """End the job if nobody runs it, else ask its owner to. Any model's job can be named."""
        answer: Any = await self._scripts.run("cancel", request_id)
        return CancelOutcome(answer.decode())

    async def expire(self, *, limit: int = 100, request_id: str | None = None) -> list[str]:
        """End what nobody runs and is past its deadline or cancelled; the ids of the jobs that this call ended.

        Looks at one job if `request_id` is given, else at no more than `limit` of each kind.
        """
        answer = await self._scripts.run("expire", limit, request_id or "")
        return [ended.decode(errors="replace") for ended in answer]

    async def touch_reader(self, request_id: str) -> bool:
        """Say that somebody reads the job, and whether that has to be said again within READER_TTL_MS.

        Only for a job that is cancelled when its readers go; of any other nothing is written.
        """
        return bool(await self._scripts.run("touch", request_id))

    async def dead_list(self, limit: int = 100) -> list[DeadLetter]:
        """The model's last dead letters, the latest first."""
        return await read_dead_letters(self._redis, self._keys, limit)

    async def dead_show(self, request_id: str) -> tuple[DeadLetter, bytes | None]:
        """The last dead letter of that id, and its payload unless that has expired. Raises UnknownRequest."""
        letter = await find_dead_letter(self._redis, self._keys, request_id)
        return letter, await read_dead_payload(self._redis, self._keys, request_id)

    async def dead_requeue(
        self, request_id: str, new_request_id: str, *, max_backlog: int, signing_keys: SigningKeys | None = None
    ) -> Enqueued:
        """Enqueue the request of a dead letter under another id, and remove the letter.

        With keys it is signed for that id, but only if it was signed for its own: whoever can write to Redis must not
        have his job signed by the one who looks after the dead. Raises UnknownRequest without such a letter or when
        its payload has expired, Unsigned, InvalidRequest for a payload that is no request, and what `enqueue` raises.
        """
        letter, payload = await self.dead_show(request_id)
        if payload is None:
            raise UnknownRequest(f"the payload of the dead letter {request_id!r} has expired")
        signature = ""
        if signing_keys is not None:
            signing_keys.verify(letter.signature, request_id, queue=self._keys.queue, payload=payload)
            signature = signing_keys.sign(new_request_id, queue=self._keys.queue, payload=payload)
        request = request_of(payload)
        return await self.enqueue(
            new_request_id,
            payload,
            deadline_ms=request.deadline_ms,
            priority=request.priority,
            tenant=request.tenant,
            trace=request.trace,
            fingerprint=fingerprint(request),
            estimate=estimate_tokens(request),
            max_backlog=max_backlog,
            dead=letter,
            signature=signature,
        )


def _read_answer(request_id: str, answer: Any) -> Enqueued:
    match answer:
        case [(b"ok" | b"existing") as kind, generation, position, entry_id]:
            return Enqueued(int(generation), int(position), entry_id.decode(), created=kind == b"ok")
        case [b"full", backlog, head_waited_ms]:
            raise _queue_full(int(backlog), int(head_waited_ms))
        case [b"conflict"]:
            raise IdempotencyConflict("another request was sent under this idempotency key")
        case [b"unusable"]:
            raise InvalidRequest(
                f"request_id: {request_id!r} cannot be used: a key of that id in Redis holds something else"
            )
        case [b"gone"]:
            raise UnknownRequest("the dead letter was requeued by somebody else, or has expired")
        case _:
            raise DuplicateRequest(f"a job with the id {request_id!r} is alive")


def _queue_full(backlog: int, head_waited_ms: int) -> QueueFull:
    """Little's law: a backlog whose head has waited that long loses a job each `waited / backlog`."""
    least, most = _RETRY_AFTER_SECONDS
    seconds = math.ceil(head_waited_ms / 1000 / max(backlog, 1))
    return QueueFull(
        f"{backlog} jobs are waiting, which is as many as are allowed",
        retry_after_seconds=min(max(float(seconds), least), most),
    )
