"""What the real server holds of one job, read as the model has it; and how accidents are brought about there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from support.wire import Wire

from inferq.producer.events import Delta, Failed, Finished, Queued, Started, decode_event
from model import state as m

#: The wire's times for "long ago" and "not yet".
DEADLINE_MS = 3_600_000


@dataclass
class Names:
    """The model's numbers for what the server has told of one job."""

    tokens: dict[str, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=lambda: {0: 0})

    def learn(self, stream: list[tuple[int, Any]], after: m.Job) -> None:
        """Name the epochs that are new; each must be above all that were there before."""
        for (epoch, _), expected in zip(stream, after.stream, strict=False):
            if epoch not in self.epochs:
                assert epoch > max(self.epochs), "an epoch is not above those before"
                self.epochs[epoch] = expected.epoch


def told(entry_id: str, event: Any, names: Names) -> m.Entry:
    """An entry of the server's as one of the model's. What every entry says the same of is checked here."""
    epoch, number = map(int, entry_id.split("-"))
    place = names.epochs.get(epoch, -1), number
    match event:
        case Queued():
            assert event.generation == epoch
            return m.Entry(*place, m.QUEUED)
        case Started():
            return m.Entry(*place, m.STARTED, event.resumed_tokens[0], event.attempt)
        case Delta():
            assert event.token_ids == tuple(range(event.index, event.index + len(event.token_ids)))
            assert (event.at, event.text) == (event.index, "x" * len(event.token_ids))
            return m.Entry(*place, m.DELTA, event.index, len(event.token_ids), event.finish_reason or "")
        case Finished():
            return m.Entry(*place, event.finish_reasons[0].value)
        case Failed():
            assert event.code == "attempts_exhausted"
            return m.Entry(*place, m.EXHAUSTED)
    raise AssertionError(f"no such entry is written here: {event}")


async def look(wire: Wire, request_id: str, names: Names, after: m.Job) -> m.Job:
    """All that can be seen of the job. `after` is what the model expects, from which new epochs get their names."""
    keys = wire.keys
    named = (keys.job(request_id), keys.payload(request_id), keys.lease(request_id), keys.cancel(request_id))
    async with wire.redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys.job(request_id))
        for name in (keys.queue, keys.running, keys.deadlines):
            pipe.zscore(name, request_id)
        pipe.get(keys.lease(request_id))
        pipe.get(keys.cancel(request_id))
        pipe.xrange(keys.events(request_id))
        for name in (*named, keys.events(request_id)):
            pipe.pttl(name)
        found, place, running, due, lease, cancel, stream, *lifetimes = await pipe.execute()
    job = {name.decode(): value.decode() for name, value in found.items()}
    entries = [(entry_id.decode(), decode_event(fields)) for entry_id, fields in stream]
    names.learn([(int(entry_id.split("-")[0]), event) for entry_id, event in entries], after)
    assert all(each != -1 for each in lifetimes), "a key has no end"
    assert (lifetimes[1] != -2) == bool(job), "there is a payload without :job, or none with it"
    assert place is None or place == float(job["order"]), "it does not wait at its own place"
    return m.Job(
        generation=names.epochs[int(job.get("generation", 0))],
        attempts=int(job.get("attempts", 0)),
        losses=int(job.get("losses", 0)),
        deadline=_deadline(job.get("expires_at_ms")),
        handed_back_by=names.tokens[job["handed_back_by"]] if "handed_back_by" in job else 0,
        queue=place is not None,
        running=running is not None,
        deadlines=due is not None,
        lease=names.tokens[lease.decode()] if lease else 0,
        cancel=names.epochs[int(cancel)] if cancel else 0,
        stream=tuple(told(entry_id, event, names) for entry_id, event in entries),
    )


def _deadline(expires_at_ms: str | None) -> int:
    if expires_at_ms is None:
        return m.NO_DEADLINE
    return m.AHEAD if int(expires_at_ms) > time.time() * 1000 else m.PAST


class Replica:
    """A copy of the database, as a replica has it that lags behind; what was written since is lost with a failover."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._values: dict[bytes, tuple[bytes, int]] = {}

    async def follow(self) -> None:
        names = sorted(await self._wire.redis.keys("*"))
        async with self._wire.redis.pipeline(transaction=True) as pipe:
            for name in names:
                pipe.dump(name)
                pipe.pttl(name)
            answers = await pipe.execute()
        self._values = {
            name: (value, max(ttl, 0))
            for name, value, ttl in zip(names, answers[::2], answers[1::2], strict=True)
            if value is not None
        }

    async def take_over(self) -> None:
        async with self._wire.redis.pipeline(transaction=True) as pipe:
            pipe.flushdb()
            for name, (value, ttl) in self._values.items():
                pipe.restore(name, ttl, value)
            await pipe.execute()
