"""From deltas to stream entries: one call in flight for all requests, and what waits meanwhile is put together.

An entry that was sent is frozen: its retry carries the same bytes under the same id, so that a lost reply never makes
a second entry. Only tokens that certainly were not written are coalesced. The end of a request takes along what is
left of it. Knows outboxes and commands; knows neither the engine nor how a request began or ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Never, Protocol

from redis.exceptions import OutOfMemoryError

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.events import FinishReason, TerminalEvent

from .background import REDIS_ERRORS, Outage, is_away, is_refused, reason_of
from .commands import MAX_ENTRIES_PER_CALL, DeadLetter, Entry, Outcome
from .log import get_logger
from .outbox import Hold, Outbox

_log: Any = get_logger("publisher")


class Appends(Protocol):
    """The commands that write to streams; WorkerCommands has them."""

    async def publish(self, entries: Sequence[Entry]) -> list[Outcome]: ...

    async def finish(self, *entries: Entry, dead: DeadLetter | None = None) -> Outcome: ...

    async def hand_back(self, request_id: str, *, token: str, expected_id: str) -> Outcome: ...


class Publisher:
    """Sends what the outboxes hold. `run` is its one task."""

    def __init__(self, commands: Appends) -> None:
        self._commands = commands
        self._waiting: dict[Outbox, None] = {}  # in the order in which they got something to send
        self._wake = asyncio.Event()
        self._outage = Outage("publisher")

    def put(self, outbox: Outbox, delta: EngineDelta, finish_reason: FinishReason | None = None) -> None:
        """Take a delta; it is sent with what else is waiting then, the last one by `finish`. Never waits."""
        outbox.add(delta, finish_reason)
        if finish_reason is None:
            self.wake(outbox)

    def wake(self, outbox: Outbox) -> None:
        """The outbox may have something to send."""
        if outbox.can_send:
            self._waiting[outbox] = None
            self._wake.set()

    async def finish(self, outbox: Outbox, event: TerminalEvent, *, dead: DeadLetter | None = None) -> Outcome | None:
        """Send what is left and the terminal event in one, until Redis answers; None for a request that was dropped.

        It waits for nothing but a stream that is in doubt: an entry that is under way meanwhile is the same here, and
        stands once.
        """
        while True:
            await outbox.known.wait()
            if outbox.gone:
                return None
            entries = outbox.conclude(event)
            outcome = await self._insist(outbox, partial(self._commands.finish, *entries, dead=dead))
            if outcome is not None and not self._is_in_doubt(outbox, outcome):
                return outcome

    async def hand_back(self, outbox: Outbox) -> Outcome | None:
        """Send what is left, then give the job back to the queue; None for a request that was dropped.

        What a full server does not take is forgotten: the next owner makes it again.
        """
        outbox.leaving = True
        self.wake(outbox)
        while True:
            await outbox.settled.wait()
            if outbox.gone:
                return None
            command = partial(
                self._commands.hand_back, outbox.request_id, token=outbox.token, expected_id=outbox.last_id
            )
            outcome = await self._insist(outbox, command)
            if outcome is not None and not self._is_in_doubt(outbox, outcome):
                return outcome

    @staticmethod
    def _is_in_doubt(outbox: Outbox, outcome: Outcome) -> bool:
        """After the last command on a stream: whether the stream has to be got back for another try."""
        if outcome is Outcome.OK or outbox.gone:
            outbox.drop()
            return False
        outbox.lose(outcome.value)
        return True

    async def _insist(self, outbox: Outbox, command: Callable[[], Awaitable[Outcome]]) -> Outcome | None:
        """The same bytes until Redis answers; None when the stream is not held any more.

        What Redis refuses by itself, or for too long, is given up: the outbox is gone then, and when the lease lapses
        another worker goes on from what was published.
        """
        outage = Outage("publisher", vital=False)
        while outbox.hold is Hold.HELD:
            try:
                outcome = await command()
            except REDIS_ERRORS as exc:
                delay = outage.failed(exc)
                if is_refused(exc) or outage.is_stuck:
                    _log.error("request.given_up", request_id=outbox.request_id, reason=reason_of(exc))
                    outbox.drop()
                    return Outcome.MOVED
                await asyncio.sleep(delay)
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
        while self._waiting and len(batch) < MAX_ENTRIES_PER_CALL:
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
            await self._cope(batch, entries, exc)
            return
        self._outage.over()
        for outbox, entry, outcome in zip(batch, entries, outcomes, strict=True):
            outbox.answer(entry, outcome)
            self.wake(outbox)

    async def _cope(self, batch: list[Outbox], entries: list[Entry], exc: Exception) -> None:
        """Send again what may get through later; what Redis refuses by itself is given up, without its neighbours."""
        for outbox in batch:
            if isinstance(exc, OutOfMemoryError):
                outbox.refused()
            elif is_away(exc):
                outbox.answer_lost()
            else:
                outbox.refused(reason_of(exc))
        if not is_refused(exc):
            self._waiting = dict.fromkeys([*batch, *self._waiting])
            await asyncio.sleep(self._outage.failed(exc))
        elif len(batch) == 1:
            batch[0].answer(entries[0], Outcome.MOVED)
        else:
            for outbox in batch:
                if outbox.can_send:
                    await self._send([outbox])
