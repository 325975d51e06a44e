"""From deltas to stream entries: one call in flight for all requests, and what waits meanwhile is put together.

An entry that was sent is frozen: its retry carries the same bytes under the same id, so that a lost reply never makes
a second entry. Only tokens that were never sent are coalesced. Knows outboxes and entries; knows neither the engine
nor how a request began or ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Never, Protocol

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.events import Delta, FinishReason, TerminalEvent, encode_event

from .background import REDIS_ERRORS, Outage
from .commands import Entry, Outcome

#: A script blocks the server: this many requests take about a millisecond.
MAX_BATCH: Final = 256


class Appends(Protocol):
    """The two commands that write to streams; WorkerCommands has them."""

    async def publish(self, entries: Sequence[Entry]) -> list[Outcome]: ...

    async def finish(self, entry: Entry) -> Outcome: ...


@dataclass(slots=True)
class _Unsent:
    """Adjacent deltas that no entry holds yet."""

    index: int
    at: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def event(self) -> Delta:
        return Delta(
            index=self.index,
            at=self.at,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Outbox:
    """What one claimed request has still to publish.

    `num_tokens` and `num_chars` count what stands in the stream or will: tokens, and code points of their text.
    """

    request_id: str
    token: str
    epoch: int
    max_unsent_tokens: int
    on_pressure: Callable[[bool], object]  #: called with True over the bound, with False when half is free again
    on_gone: Callable[[Outcome], object]  #: called once when somebody else owns the stream
    num_tokens: int = 0
    num_chars: int = 0
    gone: bool = False
    sent: Entry | None = None  #: frozen until it is answered
    settled: asyncio.Event = field(default_factory=asyncio.Event)  #: nothing waits, or nothing will be sent any more
    _sent_tokens: int = 0
    _sequence: int = 0
    _unsent: _Unsent | None = None
    _pressed: bool = False

    def __post_init__(self) -> None:
        self.settled.set()

    @property
    def num_unpublished(self) -> int:
        """Tokens that Redis has not acknowledged yet."""
        return self._sent_tokens + (len(self._unsent.token_ids) if self._unsent else 0)

    @property
    def has_unsent(self) -> bool:
        return self._unsent is not None

    def add(self, delta: EngineDelta, finish_reason: FinishReason | None) -> None:
        if self.gone:
            return
        if self._unsent is None:
            self._unsent = _Unsent(delta.index, delta.at)
            self.settled.clear()
        self._unsent.texts.append(delta.text)
        self._unsent.token_ids += delta.token_ids
        self._unsent.finish_reason = finish_reason
        self.num_tokens += len(delta.token_ids)
        self.num_chars += len(delta.text)
        self._weigh()

    def discard(self) -> bool:
        """Forget what was never sent. False if there was nothing."""
        unsent, self._unsent = self._unsent, None
        if unsent is None:
            return False
        self.num_tokens -= len(unsent.token_ids)
        self.num_chars -= sum(map(len, unsent.texts))
        self._settle()
        return True

    def drop(self) -> None:
        """Publish nothing more, not even a frozen entry again."""
        self.gone = True
        self.sent = self._unsent = None
        self.settled.set()

    def freeze(self) -> Entry:
        """The entry for what is unsent. It stays `sent` until `answer`."""
        assert self._unsent is not None and self.sent is None
        unsent, self._unsent = self._unsent, None
        self._sent_tokens = len(unsent.token_ids)
        self.sent = self.entry(unsent.event())
        return self.sent

    def entry(self, event: Delta | TerminalEvent) -> Entry:
        """The next entry of this stream, after the one that is expected to be its last."""
        kind, data = encode_event(event)
        expected, self._sequence = self._sequence, self._sequence + 1
        return Entry(
            request_id=self.request_id,
            token=self.token,
            expected_id=f"{self.epoch}-{expected}",
            entry_id=f"{self.epoch}-{self._sequence}",
            type=kind,
            data=data,
        )

    def answer(self, outcome: Outcome) -> None:
        if self.gone:
            return
        if outcome is not Outcome.OK:
            self.drop()
            self.on_gone(outcome)
            return
        self.sent = None
        self._sent_tokens = 0
        self._settle()
        self._weigh()

    def _settle(self) -> None:
        if self.sent is None and self._unsent is None:
            self.settled.set()

    def _weigh(self) -> None:
        if not self._pressed and self.num_unpublished > self.max_unsent_tokens:
            self._pressed = True
            self.on_pressure(True)
        elif self._pressed and self.num_unpublished <= self.max_unsent_tokens // 2:
            self._pressed = False
            self.on_pressure(False)


class Publisher:
    """Sends what the outboxes hold. `run` is its one task."""

    def __init__(self, commands: Appends) -> None:
        self._commands = commands
        self._waiting: dict[Outbox, None] = {}  # in the order in which they got something to send
        self._wake = asyncio.Event()
        self._outage = Outage("publisher")

    def put(self, outbox: Outbox, delta: EngineDelta, finish_reason: FinishReason | None = None) -> None:
        """Take a delta; it is sent with what else is waiting then. Never waits."""
        outbox.add(delta, finish_reason)
        self._waiting[outbox] = None
        self._wake.set()

    async def finish(self, outbox: Outbox, event: TerminalEvent) -> Outcome | None:
        """Send what is left, then the terminal event, until Redis answers; None for a request that was dropped."""
        await outbox.settled.wait()
        if outbox.gone:
            return None
        entry = outbox.entry(event)
        outage = Outage("publisher")
        while not outbox.gone:
            try:
                outcome = await self._commands.finish(entry)
            except REDIS_ERRORS as exc:
                await asyncio.sleep(outage.failed(exc))
            else:
                outage.over()
                outbox.gone = True
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
            if outbox.has_unsent:
                outbox.freeze()
                batch.append(outbox)
        return batch

    async def _send(self, batch: list[Outbox]) -> None:
        while True:
            entries = [(outbox, outbox.sent) for outbox in batch if outbox.sent is not None]
            if not entries:
                return
            try:
                outcomes = await self._commands.publish([entry for _, entry in entries])
            except REDIS_ERRORS as exc:
                await asyncio.sleep(self._outage.failed(exc))
            else:
                break
        self._outage.over()
        for (outbox, _), outcome in zip(entries, outcomes, strict=True):
            outbox.answer(outcome)
            if outbox.has_unsent:
                self._waiting[outbox] = None
