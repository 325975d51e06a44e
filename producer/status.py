"""How far one request has come, as its keys say it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .contract import Keys
from .estimate import estimate_wait
from .events import Event, Failed, Finished, FinishReason, Started
from .position import EntryId
from .reader import Entry, is_terminal, read_event
from .results import State, Status

if TYPE_CHECKING:
    from arq.connections import ArqRedis


async def read_status(redis: ArqRedis, keys: Keys, request_id: str) -> Status:
    """One pipeline tells where the request is, by what is true at one time; a second one finds the details."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hget(keys.job(request_id), "model")
        pipe.exists(keys.payload(request_id))
        pipe.exists(keys.lease(request_id))
        pipe.xrevrange(keys.events(request_id), count=1)
        model, has_payload, has_lease, entries = await pipe.execute()
    last: Entry | None = entries[0] if entries else None
    if last is not None and is_terminal(last):
        return _ended(request_id, read_event(request_id, last))
    if model is None and not has_payload:
        return Status(request_id=request_id, state=State.UNKNOWN)
    name = model.decode() if model else keys.model
    if has_lease:
        started = await _last_started(redis, keys, request_id, last)
        return _running(request_id, name, started)
    own = Keys(name, keys.prefix)
    position = await redis.zrank(own.queue, request_id)
    wait = None if position is None else await estimate_wait(redis, own, position)
    return Status(request_id=request_id, state=State.QUEUED, model=name, position=position, estimated_wait_seconds=wait)


async def _last_started(redis: ArqRedis, keys: Keys, request_id: str, last: Entry | None) -> Event | None:
    """An owner's epoch begins with its `started`."""
    if last is None:
        return None
    begin = f"{EntryId.parse(last[0]).epoch}-0"
    entries: list[Any] = await redis.xrange(keys.events(request_id), begin, begin)
    return read_event(request_id, entries[0]) if entries else None


def _running(request_id: str, model: str, started: Event | None) -> Status:
    known = started if isinstance(started, Started) else None
    return Status(
        request_id=request_id,
        state=State.RUNNING,
        model=model,
        attempt=known.attempt if known else None,
        worker=known.worker if known else None,
    )


def _ended(request_id: str, event: Event | None) -> Status:
    match event:
        case Finished():
            cancelled = bool(event.finish_reasons) and set(event.finish_reasons) == {FinishReason.CANCELLED}
            state = State.CANCELLED if cancelled else State.FINISHED
            return Status(request_id=request_id, state=state, finish_reasons=event.finish_reasons)
        case Failed():
            code, message = event.code, event.message
            return Status(
                request_id=request_id,
                state=State.FAILED,
                attempt=event.attempts,
                error_code=code,
                error_message=message,
            )
        case _:
            raise AssertionError("only a terminal event ends a request")
