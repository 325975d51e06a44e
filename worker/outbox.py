"""What one claimed request has still to publish, and what it has published: the whole answer so far.

The answer is kept to its end, because a server that fails over may lose the tail of a stream: then the owner sends
that again. Knows entries and their ids; knows neither Redis nor the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.events import FinishReason, TerminalEvent, encode_delta, encode_event

from .commands import Entry, Outcome
from .progress import Progress

#: A request whose tokens the server has refused for so long is given up.
REFUSED_SECONDS: Final = 30.0


class Hold(Enum):
    """What the owner has of its stream."""

    HELD = "held"  #: the lease, and the last entry, as far as is known
    LOST = "lost"  #: one of them is in doubt: nothing is sent until the stream is back
    GONE = "gone"  #: it is somebody else's, or it has ended: nothing is sent any more


@dataclass(slots=True, kw_only=True, eq=False)
class Outbox:
    """`token_ids` and `num_chars` count what stands in the stream or will: tokens, and code points of their text.

    A place in the answer is how many tokens and how many code points stand before it.
    """

    request_id: str
    token: str
    generation: int  #: of the job that was claimed: an id may have others, before and after it
    epoch: int
    max_unsent_tokens: int
    on_pressure: Callable[[bool], object]  #: called with True over the bound, with False when half is free again
    on_lost: Callable[[str], object]  #: called when the stream has to be got back
    on_stuck: Callable[[str | None], object]  #: called after REFUSED_SECONDS, and again later; see `refused`
    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    finish_reason: FinishReason | None = None
    hold: Hold = Hold.HELD
    sent: Entry | None = None  #: frozen until it is answered
    known: asyncio.Event = field(default_factory=asyncio.Event)  #: it is held, or gone, and not in doubt
    settled: asyncio.Event = field(default_factory=asyncio.Event)  #: nothing waits, or nothing will be sent any more
    leaving: bool = False  #: the job is handed back: what a full server refuses is another worker's to make again
    _texts: list[str] = field(default_factory=list)
    _unsent_texts: list[str] = field(default_factory=list)
    _entered_tokens: int = 0  #: what entries hold, be they acknowledged or not
    _entered_chars: int = 0
    _published_tokens: int = 0  #: what Redis has acknowledged
    _published_chars: int = 0
    _end_entered: bool = False
    _sequence: int = 0
    _closing: bool = False  #: its last entries are under way
    _doubtful: bool = False  #: an answer was lost: the frozen entry may stand in the stream
    _pressed: bool = False
    _refused_since: float | None = None

    def __post_init__(self) -> None:
        self.known.set()
        self.settled.set()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_unpublished(self) -> int:
        """Tokens that Redis has not acknowledged yet."""
        return len(self.token_ids) - self._published_tokens

    @property
    def gone(self) -> bool:
        return self.hold is Hold.GONE

    @property
    def last_id(self) -> str:
        """The entry that is expected to be the stream's last."""
        return f"{self.epoch}-{self._sequence}"

    @property
    def can_send(self) -> bool:
        return self.hold is Hold.HELD and not self._closing and (self.sent is not None or self._has_unsent)

    @property
    def _has_unsent(self) -> bool:
        if self.finish_reason is not None and not self._end_entered:
            return True
        return len(self.token_ids) != self._entered_tokens or self.num_chars != self._entered_chars

    # ---- what comes in ----

    def continue_from(self, progress: Progress) -> None:
        """Go on behind what an earlier owner has published."""
        self.token_ids = list(progress.token_ids)
        self._texts, self.num_chars = [progress.text], progress.num_chars
        self.finish_reason = progress.finish_reason
        self._mark_entered(progress)

    def add(self, delta: EngineDelta, finish_reason: FinishReason | None) -> None:
        """Raises ValueError for a delta that is not the next one: it would leave a hole in the answer."""
        if self.gone or self._closing:
            return
        if delta.index != len(self.token_ids) or delta.at != self.num_chars:
            raise ValueError(
                f"a delta at {delta.index}.{delta.at}, where {len(self.token_ids)}.{self.num_chars} is next"
            )
        self.token_ids += delta.token_ids
        self.num_chars += len(delta.text)
        self._unsent_texts.append(delta.text)
        self.finish_reason = finish_reason
        if self._has_unsent:
            self.settled.clear()
        self._weigh()

    def discard(self) -> bool:
        """Forget what no entry holds. False if there was nothing."""
        if self._closing or not self._has_unsent:
            return False
        del self.token_ids[self._entered_tokens :]
        self.num_chars = self._entered_chars
        self._unsent_texts.clear()
        self._settle()
        return True

    # ---- what goes out ----

    def freeze(self) -> Entry:
        """The entry that goes next: the frozen one, or a new one of all that is unsent. It stays until `answer`."""
        if self.sent is None:
            self.sent = self._enter_unsent()
        return self.sent

    def conclude(self, event: TerminalEvent) -> list[Entry]:
        """The last entries: the frozen one, what is unsent, the terminal event. Only `restart` lets others follow."""
        self._closing = True
        entries = [] if self.sent is None else [self.sent]
        if self._has_unsent:
            entries.append(self._enter_unsent())
        self._settle()
        return [*entries, self._entry(*encode_event(event))]

    def _enter_unsent(self) -> Entry:
        text = "".join(self._unsent_texts)
        kind, data = encode_delta(
            index=self._entered_tokens,
            at=self._entered_chars,
            text=text,
            token_ids=self.token_ids[self._entered_tokens :],
            finish_reason=self.finish_reason,
        )
        self._texts.append(text)
        self._unsent_texts.clear()
        self._entered_tokens, self._entered_chars = len(self.token_ids), self.num_chars
        self._end_entered = self.finish_reason is not None
        return self._entry(kind, data)

    def _entry(self, kind: str, data: str) -> Entry:
        """The next entry of this stream, after the one that is expected to be its last."""
        expected_id, self._sequence = self.last_id, self._sequence + 1
        return Entry(self.request_id, self.token, expected_id, self.last_id, kind, data)

    def answer(self, entry: Entry, outcome: Outcome) -> None:
        """What became of an entry. The late answer to one that is not waited for any more changes nothing."""
        if self.sent is not entry or self._closing:
            return
        if outcome is not Outcome.OK:
            self.lose(outcome.value)
            return
        self.sent = self._refused_since = None
        self._doubtful = False
        self._published_tokens, self._published_chars = self._entered_tokens, self._entered_chars
        self._settle()
        self._weigh()

    def answer_lost(self) -> None:
        """Nobody knows whether the frozen entry stands in the stream, until its repeat is answered."""
        self._doubtful = True
        self._refused_since = None

    def refused(self, reason: str | None = None) -> None:
        """The server takes nothing now, for a reason; without one it is full, and has written nothing.

        An entry that a full server certainly does not have is thawed.
        """
        if self.hold is not Hold.HELD or self._closing:
            return
        if reason is not None:
            self._doubtful = True
        elif self.sent is not None and not self._doubtful:
            self._thaw()
        if self.leaving:
            self.discard()
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since >= REFUSED_SECONDS:
            self.on_stuck(reason)

    def _thaw(self) -> None:
        self.sent, self._sequence = None, self._sequence - 1
        self._unsent_texts.insert(0, self._texts.pop())
        self._entered_tokens, self._entered_chars = self._published_tokens, self._published_chars
        self._end_entered = False

    # ---- whose it is ----

    def lose(self, why: str) -> None:
        """Send nothing until `restart`; what comes in meanwhile is kept."""
        if self.hold is Hold.HELD:
            self.hold = Hold.LOST
            self.known.clear()
            self._settle()
            self.on_lost(why)

    def restart(self, epoch: int, progress: Progress) -> bool:
        """The stream is this owner's again, and holds so much: go on with what it lacks.

        False, and still lost, if it holds what this owner has never made: tokens, or another end.
        """
        text = "".join([*self._texts, *self._unsent_texts])
        own_end = self.finish_reason, len(self.token_ids)
        its_end = progress.finish_reason, len(progress.token_ids)
        ended_elsewhere = progress.finish_reason is not None and own_end != its_end
        if ended_elsewhere or not progress.begins(self.token_ids, text):
            return False
        self.epoch, self._sequence, self.sent = epoch, 0, None
        self._closing = self._doubtful = False
        self._refused_since = None
        self._texts, self._unsent_texts = [progress.text], [text[progress.num_chars :]]
        self._mark_entered(progress)
        self.hold = Hold.HELD
        self.known.set()
        self._settle()
        self._weigh()
        return True

    def drop(self) -> None:
        """Publish nothing more, not even a frozen entry again."""
        self.hold = Hold.GONE
        self.sent = None
        self.known.set()
        self.settled.set()

    def _mark_entered(self, progress: Progress) -> None:
        self._entered_tokens = self._published_tokens = len(progress.token_ids)
        self._entered_chars = self._published_chars = progress.num_chars
        self._end_entered = progress.finish_reason is not None

    def _settle(self) -> None:
        if self.gone or (self.hold is Hold.HELD and not self.can_send):
            self.settled.set()
        else:
            self.settled.clear()

    def _weigh(self) -> None:
        if not self._pressed and self.num_unpublished > self.max_unsent_tokens:
            self._pressed = True
            self.on_pressure(True)
        elif self._pressed and self.num_unpublished <= self.max_unsent_tokens // 2:
            self._pressed = False
            self.on_pressure(False)
