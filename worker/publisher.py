"""From deltas to stream entries: one call in flight for all requests, and what waits meanwhile is put together.

An entry that was sent is frozen: its retry carries the same bytes under the same id, so that a lost reply never makes
a second entry. Only tokens that certainly were not written are coalesced. The end of a request takes along what is
left of it. Knows outboxes and entries; knows neither the engine nor how a request began or ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Never, Protocol

from redis.exceptions import OutOfMemoryError

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.events import Delta, FinishReason, TerminalEvent, encode_event

from .background import REDIS_ERRORS, Outage, is_refused
from .commands import MAX_ENTRIES_PER_CALL, Entry, Outcome

#: A request whose tokens a full server has refused for so long is given up.
FULL_SECONDS: Final = 30.0


class Appends(Protocol):
    """The two commands that write to streams; WorkerCommands has them."""

    async def publish(self, entries: Sequence[Entry]) -> list[Outcome]: ...

    async def finish(self, *entries: Entry) -> Outcome: ...


@dataclass(slots=True)
class _Tokens:
    """Adjacent deltas on their way into one entry."""

    index: int
    at: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def extend(self, later: _Tokens) -> None:
        self.texts += later.texts
        self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason

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
    on_stuck: Callable[[], object]  #: called when a full server has refused for FULL_SECONDS, and again later
    num_tokens: int = 0
    num_chars: int = 0
    gone: bool = False  #: dropped: nothing is written any more
    closed: bool = False  #: gone, or its last entries are under way
    _sent: Entry | None = None  # frozen until it is answered
    _frozen: _Tokens | None = None  # what it was made of
    _doubtful: bool = False  # an answer was lost: it may stand in the stream
    _unsent: _Tokens | None = None  # what no entry holds yet
    _sequence: int = 0
    _pressed: bool = False
    _refused_since: float | None = None

    @property
    def num_unpublished(self) -> int:
        """Tokens that Redis has not acknowledged yet."""
        return sum(len(tokens.token_ids) for tokens in (self._frozen, self._unsent) if tokens)

    @property
    def has_more(self) -> bool:
        return not self.closed and (self._sent is not None or self._unsent is not None)

    def add(self, delta: EngineDelta, finish_reason: FinishReason | None) -> None:
        if self.closed:
            return
        tokens = _Tokens(delta.index, delta.at, [delta.text], list(delta.token_ids), finish_reason)
        if self._unsent is None:
            self._unsent = tokens
        else:
            self._unsent.extend(tokens)
        self.num_tokens += len(delta.token_ids)
        self.num_chars += len(delta.text)
        self._weigh()

    def discard(self) -> bool:
        """Forget what no entry holds. False if there was nothing."""
        unsent, self._unsent = self._unsent, None
        if unsent is None:
            return False
        self.num_tokens -= len(unsent.token_ids)
        self.num_chars -= sum(map(len, unsent.texts))
        return True

    def drop(self) -> None:
        """Publish nothing more, not even a frozen entry again."""
        self.gone = True
        self._close()

    def close(self, event: TerminalEvent) -> list[Entry]:
        """The last entries: the frozen one, what is unsent, the terminal event. Nothing follows them."""
        entries = [] if self._sent is None else [self._sent]
        if self._unsent is not None:
            entries.append(self._entry(self._unsent.event()))
        self._close()
        return [*entries, self._entry(event)]

    def freeze(self) -> Entry:
        """The entry to send: the one that has no answer yet, else one for all that is unsent."""
        if self._sent is None:
            assert self._unsent is not None
            self._frozen, self._unsent = self._unsent, None
            self._sent = self._entry(self._frozen.event())
        return self._sent

    def answer(self, outcome: Outcome) -> None:
        if self.closed:
            return
        if outcome is not Outcome.OK:
            self.drop()
            self.on_gone(outcome)
            return
        self._sent = self._frozen = self._refused_since = None
        self._doubtful = False
        self._weigh()

    def answer_lost(self) -> None:
        """Nobody knows whether the entry stands in the stream, until its repeat is answered."""
        self._doubtful = True

    def refused(self) -> None:
        """A full server has written nothing. An entry that it certainly does not have is thawed."""
        if self.closed:
            return
        if self._frozen is not None and not self._doubtful:
            if self._unsent is not None:
                self._frozen.extend(self._unsent)
            self._unsent, self._frozen, self._sent = self._frozen, None, None
            self._sequence -= 1
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since >= FULL_SECONDS:
            self.on_stuck()

    def _entry(self, event: Delta | TerminalEvent) -> Entry:
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

    def _close(self) -> None:
        self.closed = True
        self._sent = self._frozen = self._unsent = None

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
        """Take a delta; it is sent with what else is waiting then, the last one by `finish`. Never waits."""
        outbox.add(delta, finish_reason)
        if finish_reason is None:
            self._waiting[outbox] = None
            self._wake.set()

    async def finish(self, outbox: Outbox, event: TerminalEvent) -> Outcome | None:
        """Send what is left and the terminal event in one, until Redis answers; None for a request that was dropped.

        It waits for nothing: an entry that is under way meanwhile is the same here, and stands once.
        """
        if outbox.gone:
            return None
        entries = outbox.close(event)
        outage = Outage("publisher")
        while not outbox.gone:
            try:
                outcome = await self._commands.finish(*entries)
            except REDIS_ERRORS as exc:
                if is_refused(exc):
                    return Outcome.MOVED
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
        while self._waiting and len(batch) < MAX_ENTRIES_PER_CALL:
            outbox = next(iter(self._waiting))
            del self._waiting[outbox]
            if outbox.has_more:
                batch.append(outbox)
        return batch

    async def _send(self, batch: list[Outbox]) -> None:
        try:
            outcomes = await self._commands.publish([outbox.freeze() for outbox in batch])
        except REDIS_ERRORS as exc:
            await self._cope(batch, exc)
            return
        self._outage.over()
        for outbox, outcome in zip(batch, outcomes, strict=True):
            outbox.answer(outcome)
            if outbox.has_more:
                self._waiting[outbox] = None

    async def _cope(self, batch: list[Outbox], exc: Exception) -> None:
        """Send again what may get through later; what Redis refuses by itself is given up, without its neighbours."""
        for outbox in batch:
            if isinstance(exc, OutOfMemoryError):
                outbox.refused()
            else:
                outbox.answer_lost()
        if not is_refused(exc):
            self._waiting = dict.fromkeys([*batch, *self._waiting])
            await asyncio.sleep(self._outage.failed(exc))
        elif len(batch) == 1:
            batch[0].answer(Outcome.MOVED)
        else:
            for outbox in batch:
                if outbox.has_more:
                    await self._send([outbox])
