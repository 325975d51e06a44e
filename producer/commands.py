"""What a producer does to the queue, one script a command: enqueue, cancel, expire.

Knows the scripts' arguments and answers; what they do stands in the scripts themselves.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .contract import Keys
from .errors import DuplicateRequest, InvalidRequest, QueueFull
from .lua import ScriptRunner

if TYPE_CHECKING:
    from redis.asyncio import Redis

_SCRIPTS: Final = Path(__file__).with_name("scripts")
_RETRY_AFTER_SECONDS: Final = (1.0, 60.0)


class CancelOutcome(StrEnum):
    UNKNOWN = "unknown"  #: nothing is known under that id; nothing was written
    FINISHED = "finished"  #: it had ended before; nothing was written
    CANCELLED = "cancelled"  #: nobody was running it, so it has ended now
    REQUESTED = "requested"  #: a worker is running it, and will end it


@dataclass(frozen=True, slots=True)
class Enqueued:
    """An accepted job: `position` counts the jobs before it, `entry_id` is that of its `queued` entry."""

    generation: int
    position: int
    entry_id: str


class ProducerCommands:
    """The producer's scripts, for one served model."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
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
    ) -> Enqueued:
        """Accept the job, or refuse it and leave everything as it was.

        Raises DuplicateRequest while a job of that id lives, QueueFull at `max_backlog` waiting jobs,
        InvalidRequest where something else stands under a key of that id, and redis.exceptions.OutOfMemoryError
        when the server is full. A call that the connection sends twice (its reply was lost) is known by its
        `submission` and answered as the first one was, also when the job has ended meanwhile.
        """
        submission = uuid.uuid4().hex
        deadline = "" if deadline_ms is None else deadline_ms
        details = (deadline, priority, tenant, trace or "", fingerprint, estimate, max_backlog)
        answer = await self._scripts.run("enqueue", request_id, payload, submission, *details)
        match answer:
            case [b"ok", generation, position, entry_id]:
                return Enqueued(int(generation), int(position), entry_id.decode())
            case [b"full", backlog, head_waited_ms]:
                raise _queue_full(int(backlog), int(head_waited_ms))
            case [b"unusable"]:
                raise InvalidRequest(
                    f"request_id: {request_id!r} cannot be used: a key of that id in Redis holds something else"
                )
            case _:
                raise DuplicateRequest(f"a job with the id {request_id!r} is alive")

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


def _queue_full(backlog: int, head_waited_ms: int) -> QueueFull:
    """Little's law: a backlog whose head has waited that long loses a job each `waited / backlog`."""
    least, most = _RETRY_AFTER_SECONDS
    seconds = math.ceil(head_waited_ms / 1000 / max(backlog, 1))
    return QueueFull(
        f"{backlog} jobs are waiting, which is as many as are allowed",
        retry_after_seconds=min(max(float(seconds), least), most),
    )
