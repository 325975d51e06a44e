"""From deltas to stream entries: one call in flight for all requests, and what waits meanwhile is put together.

An entry that was sent is frozen: its retry carries the same bytes under the same id, so that a lost reply never makes
a second entry. Only tokens that were never sent are coalesced. Knows outboxes and commands; knows neither the engine
nor how a request began or ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Never, Protocol

from redis.exceptions import OutOfMemoryError

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.events import FinishReason, TerminalEvent

from .background import REDIS_ERRORS, Outage
from .commands import DeadLetter, Entry, Outcome
from .outbox import Hold, Outbox

#: A script blocks the server: this many requests take about a millisecond.
MAX_BATCH: Final = 256
#: A full server refuses entries for so long before the requests that wait for it are given up.
PATIENCE_SECONDS: Final = 30.0


class Appends(Protocol):
    """The commands that write to streams; WorkerCommands has them."""

    async def publish(self, entries: Sequence[Entry]) -> list[Outcome]: ...

    async def finish(self, entry: Entry, *, dead: DeadLetter | None = None) -> Outcome: ...

    async def hand_back(self, request_id: str, *, token: str, expected_id: str) -> Outcome: ...


class Publisher:
    """Sends what the outboxes hold. `run` is its one task."""

    def __init__(self, commands: Appends, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._commands = commands
        self._patience_seconds = patience_seconds
        self._waiting: dict[Outbox, None] = {}  # in the order in which they got something to send
        self._wake = asyncio.Event()
        self._outage = Outage("publisher")

    def put(self, outbox: Outbox, delta: EngineDelta, finish_reason: FinishReason | None = None) -> None:
        """Take a delta; it is sent with what else is waiting then. Never waits."""
        outbox.add(delta, finish_reason)
        self.wake(outbox)

    def wake(self, outbox: Outbox) -> None:
        """The outbox may have something to send."""
        if outbox.can_send:
            self._waiting[outbox] = None
            self._wake.set()

    async def finish(self, outbox: Outbox, event: TerminalEvent, *, dead: DeadLetter | None = None) -> Outcome | None:
        """Send what is left, then the terminal event, until Redis takes it; None for a request that was dropped."""
        return await self._conclude(outbox, lambda: partial(self._commands.finish, outbox.entry(event), dead=dead))

    async def hand_back(self, outbox: Outbox) -> Outcome | None:
        """Send what is left, then give the job back to the queue; None for a request that was dropped."""
        return await self._conclude(
            outbox,
            lambda: partial(
                self._commands.hand_back, outbox.request_id, token=outbox.token, expected_id=outbox.last_id
            ),
        )

    async def _conclude(self, outbox: Outbox, make: Callable[[], Callable[[], Awaitable[Outcome]]]) -> Outcome | None:
        """Do the last command on a stream; as often as the stream had to be got back meanwhile, a new one."""
        while True:
            await outbox.settled.wait()
            if outbox.gone:
                return None
            outcome = await self._insist(outbox, make())
            if outcome is Outcome.OK:
                outbox.drop()
                return outcome
            if outcome is not None:
                outbox.lose(outcome.value)

    async def _insist(self, outbox: Outbox, command: Callable[[], Awaitable[Outcome]]) -> Outcome | None:
        """The same bytes until Redis answers; None when the stream is not held any more."""
        outage = Outage("publisher")
        while outbox.hold is Hold.HELD:
            try:
                outcome = await command()
            except REDIS_ERRORS as exc:
                await asyncio.sleep(outage.failed(exc))
            else:
                outage.over()
                return outcome
        return None

    async def run(self) -> Never:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._next_batch():
                await self._send(batch)

    def _next_batch(self) -> list[Outbox]:
        batch: list[Outbox] = []
        while self._waiting and len(batch) < MAX_BATCH:
            outbox = next(iter(self._waiting))
            del self._waiting[outbox]
            if outbox.can_send:
                batch.append(outbox)
        return batch

    async def _send(self, batch: list[Outbox]) -> None:
        entries = [outbox.freeze() for outbox in batch]
        try:
            outcomes = await self._commands.publish(entries)
        except REDIS_ERRORS as exc:
            self._waiting = {**dict.fromkeys(batch), **self._waiting}
            if isinstance(exc, OutOfMemoryError):
                self._refused()
            await asyncio.sleep(self._outage.failed(exc))
            return
        self._outage.over()
        for outbox, entry, outcome in zip(batch, entries, outcomes, strict=True):
            outbox.answer(entry, outcome)
            self.wake(outbox)

    def _refused(self) -> None:
        now = time.monotonic()
        for outbox in list(self._waiting):
            outbox.refuse(now, self._patience_seconds)
