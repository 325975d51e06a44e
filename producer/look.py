"""A direct look at one request: what its stream holds, and how its job is, in one round trip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from .contract import Keys
from .events import NoWorker
from .reader import Entry, is_terminal

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from .position import EntryId


@dataclass(frozen=True, slots=True)
class Look:
    """What stood in Redis. The parts were read one after the other: `entries` may go past `last`."""

    last: Entry | None  #: the stream's last entry
    entries: list[Entry]  #: what it holds after the cursor
    model: str | None  #: of the job, while it is alive
    left_s: float | None  #: until the job's deadline, below 0 after it; None if it has none
    ends_unread: bool  #: whether the job is to be cancelled when nobody reads it any more
    has_payload: bool
    has_lease: bool

    @property
    def waits_for_worker(self) -> bool:
        return self.model is not None and not self.has_lease and not is_terminal(self.last)


async def look_at(redis: Redis, keys: Keys, request_id: str, cursor: EntryId, count: int | None) -> Look:
    """Entries after `cursor` are up to `count`; with None all of them, as one command reads them."""
    events = keys.events(request_id)
    async with redis.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.xrevrange(events, count=1)
        pipe.hmget(keys.job(request_id), ["model", "expires_at_ms", "cancel_on_disconnect"])
        pipe.exists(keys.payload(request_id))
        pipe.exists(keys.lease(request_id))
        pipe.xread({events: str(cursor)}, count=count)
        (seconds, micros), last, job, has_payload, has_lease, answer = await pipe.execute()
    model, expires_at_ms, ends_unread = job
    left_ms = float(expires_at_ms or 0) - (seconds * 1000 + micros / 1000)
    return Look(
        last=last[0] if last else None,
        entries=cast("list[Entry]", answer[0][1]) if answer else [],
        model=model.decode() if model else None,
        left_s=left_ms / 1000 if expires_at_ms is not None else None,
        ends_unread=ends_unread is not None,
        has_payload=bool(has_payload),
        has_lease=bool(has_lease),
    )


async def find_no_worker(redis: Redis, keys: Keys, look: Look) -> NoWorker | None:
    """The notice that a request waits for a model that no live worker serves, if that is so."""
    if look.model is None or not look.waits_for_worker:
        return None
    served = await redis.exists(Keys(look.model, keys.prefix).card)
    return None if served else NoWorker(model=look.model)
