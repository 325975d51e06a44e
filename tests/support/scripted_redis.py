"""Streams with compare-and-append in memory, and calls that fail as told: what the publisher meets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from redis.exceptions import ConnectionError, OutOfMemoryError, ResponseError

from inferq.producer.events import Delta, decode_event
from inferq.worker.commands import Entry, Outcome


@dataclass
class ScriptedRedis:
    """Streams with compare-and-append, as the scripts have it; `plan` says what happens to each call in turn."""

    streams: dict[str, list[Entry]] = field(default_factory=dict)
    #: "ok", "refused" (nothing applied), "lost" (applied, no reply) or "full" (what is new is refused, but at the end)
    plan: list[str] = field(default_factory=list)
    full: bool = False  #: "full", whatever the plan says
    poisoned: set[str] = field(default_factory=set)  #: a call with an entry of these requests is an error
    owners: dict[str, str] = field(default_factory=dict)
    calls: list[list[Entry]] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def publish(self, entries: Sequence[Entry]) -> list[Outcome]:
        return await self._call(list(entries), frees=False)

    async def finish(self, *entries: Entry) -> Outcome:
        outcomes = await self._call(list(entries), frees=True)
        return next((outcome for outcome in outcomes if outcome is not Outcome.OK), Outcome.OK)

    async def _call(self, entries: list[Entry], *, frees: bool) -> list[Outcome]:
        self.calls.append(entries)
        step = self.plan.pop(0) if self.plan else "ok"
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if step == "refused":
            raise ConnectionError("scripted")
        if self.poisoned & {entry.request_id for entry in entries}:
            raise ResponseError("scripted")
        full = (self.full or step == "full") and not frees
        if full and any(entry not in self.streams.get(entry.request_id, []) for entry in entries):
            raise OutOfMemoryError("scripted")
        outcomes = [self._append(entry) for entry in entries]
        if step == "lost":
            raise ConnectionError("scripted")
        return outcomes

    def _append(self, entry: Entry) -> Outcome:
        stream = self.streams.setdefault(entry.request_id, [])
        last = stream[-1].entry_id if stream else "7-0"
        if entry in stream:
            return Outcome.OK
        if self.owners.get(entry.request_id, entry.token) != entry.token:
            return Outcome.FENCED
        if last == entry.expected_id:
            stream.append(entry)
            return Outcome.OK
        return Outcome.MOVED

    def deltas(self, request_id: str) -> list[Delta]:
        events = [decode_event({b"t": e.type.encode(), b"d": e.data.encode()}) for e in self.streams[request_id]]
        return [event for event in events if isinstance(event, Delta)]
