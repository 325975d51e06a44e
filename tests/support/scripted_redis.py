"""Streams with compare-and-append in memory, and calls that fail as told: what publisher and recovery meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from inferq.producer.events import Delta, decode_event
from inferq.worker.commands import Entry, Outcome, Reacquired

#: What may come instead of an answer; nothing was applied then.
ERRORS: dict[str, Callable[[str], Exception]] = {
    "refused": ConnectionError,
    "reset": OSError,
    "late": TimeoutError,
    "full": OutOfMemoryError,
    "loading": BusyLoadingError,
    "readonly": ReadOnlyError,
    "denied": NoPermissionError,
    "misconfigured": lambda message: ResponseError(f"MISCONF {message}"),
}


@dataclass
class ScriptedRedis:
    """Streams with compare-and-append, as the scripts have it; `plan` says what happens to each call in turn.

    A stream begins behind the `started` of epoch 7, which is not kept. Somebody else's token in `owners` stands for a
    lease that is somebody else's, None for one that has lapsed.
    """

    streams: dict[str, list[Entry]] = field(default_factory=dict)
    plan: list[str] = field(default_factory=list)  #: "ok", "lost" (applied, but the reply is lost), or one of ERRORS
    full: bool = False  #: what is new is refused, but at the end, whatever the plan says
    poisoned: set[str] = field(default_factory=set)  #: a call with an entry of these requests is an error
    owners: dict[str, str | None] = field(default_factory=dict)
    calls: list[list[Entry]] = field(default_factory=list)
    handed_back: list[str] = field(default_factory=list)
    dead: list[Any] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)  #: jobs that are gone
    gate: asyncio.Event | None = None

    async def publish(self, entries: Sequence[Entry]) -> list[Outcome]:
        return await self._call(lambda: [self._append(entry) for entry in entries], list(entries))

    async def finish(self, *entries: Entry, dead: Any = None) -> Outcome:
        return await self._call(lambda: self._finish(entries, dead), list(entries), frees=True)

    async def hand_back(self, request_id: str, *, token: str, expected_id: str) -> Outcome:
        return await self._call(lambda: self._hand_back(request_id, token, expected_id))

    async def reacquire(
        self, request_id: str, *, token: str, generation: int, epoch: int, worker: str, lease_ms: int
    ) -> Reacquired | None:
        return await self._call(lambda: self._reacquire(request_id, token, epoch))

    async def xrange(self, name: str, min: str, max: str, count: int) -> Any:
        """The whole stream, whatever part of it was asked for."""
        stream = self.streams.get(name.split(":")[1], [])
        entries = [(e.entry_id.encode(), {b"t": e.type.encode(), b"d": e.data.encode()}) for e in stream]
        return await self._call(lambda: entries if min == "-" else [])

    # ---- what happens to a stream behind its owner's back ----

    def lose_tail(self, request_id: str, keep: int) -> None:
        """A replica without the last entries has been promoted."""
        del self.streams[request_id][keep:]

    def lapse(self, request_id: str) -> None:
        self.owners[request_id] = None

    async def _call(self, apply: Callable[[], Any], entries: Sequence[Entry] = (), *, frees: bool = False) -> Any:
        if entries:
            self.calls.append(list(entries))
        step = self.plan.pop(0) if self.plan else "ok"
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        full = (self.full or step == "full") and not frees
        if step in ERRORS and step != "full":
            raise ERRORS[step]("scripted")
        if self.poisoned & {entry.request_id for entry in entries}:
            raise ResponseError("scripted")
        if full and any(entry not in self.streams.get(entry.request_id, []) for entry in entries):
            raise OutOfMemoryError("scripted")
        answer = apply()
        if step == "lost":
            raise ConnectionError("scripted")
        return answer

    def _last_id(self, request_id: str) -> str:
        stream = self.streams.setdefault(request_id, [])
        return stream[-1].entry_id if stream else "7-0"

    def _holds(self, request_id: str, token: str) -> bool:
        return request_id not in self.ended and self.owners.get(request_id, token) == token

    def _append(self, entry: Entry) -> Outcome:
        last_id, stream = self._last_id(entry.request_id), self.streams[entry.request_id]
        if self._holds(entry.request_id, entry.token) and last_id == entry.expected_id:
            stream.append(entry)
            return Outcome.OK
        if entry in stream:
            return Outcome.OK
        return Outcome.MOVED if self._holds(entry.request_id, entry.token) else Outcome.FENCED

    def _finish(self, entries: Sequence[Entry], dead: Any) -> Outcome:
        outcomes = [self._append(entry) for entry in entries]
        if (wrong := next((outcome for outcome in outcomes if outcome is not Outcome.OK), None)) is not None:
            return wrong
        if entries[-1].request_id not in self.ended:
            self.ended.add(entries[-1].request_id)
            self.dead += [dead] if dead is not None else []
        return Outcome.OK

    def _hand_back(self, request_id: str, token: str, expected_id: str) -> Outcome:
        if not self._holds(request_id, token):
            return Outcome.FENCED
        if self._last_id(request_id) != expected_id:
            return Outcome.MOVED
        self.handed_back.append(request_id)
        self.owners[request_id] = None
        return Outcome.OK

    def _reacquire(self, request_id: str, token: str, epoch: int) -> Reacquired | None:
        last_epoch = int(self._last_id(request_id).partition("-")[0])
        owner = self.owners.get(request_id, token)
        if request_id in self.ended or owner not in (None, token) or (owner is None and last_epoch > epoch):
            return None
        self.owners[request_id] = token
        fresh = max(last_epoch, epoch) + 10
        started = '{"attempt":1,"worker":"w","resumed_tokens":[0],"queue_ms":0}'
        self.streams[request_id].append(Entry(request_id, token, "", f"{fresh}-0", "started", started))
        return Reacquired(fresh, ())

    def deltas(self, request_id: str) -> list[Delta]:
        events = [decode_event({b"t": e.type.encode(), b"d": e.data.encode()}) for e in self.streams[request_id]]
        return [event for event in events if isinstance(event, Delta)]
