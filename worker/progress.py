"""What a stream holds of a request, read back from its entries: what an owner goes on from.

Knows events and how deltas fit together; knows nothing of leases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from inferq.producer.contract import Keys
from inferq.producer.events import Delta, Event, FinishReason, Started, decode_event

#: Entries of one XRANGE: about a millisecond to decode, so that the event loop goes on in between.
_PAGE: Final = 200


class BrokenStream(Exception):
    """The stream has a hole, or holds what is no event."""


class Ranges(Protocol):
    """The one command that is needed of a redis-py client. Its answer is awaited."""

    def xrange(self, name: str, min: str, max: str, count: int) -> Any: ...


@dataclass(slots=True)
class Progress:
    """The answer as far as it was published, and when its first attempt began."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_chars: int = 0
    finish_reason: FinishReason | None = None
    started_ms: float | None = None  #: its first claim, by Redis' clock

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def begins(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether an answer of these tokens and this text begins with what was published."""
        return list(token_ids[: len(self.token_ids)]) == self.token_ids and text.startswith(self.text)

    def add(self, entry_id: str, event: Event | None) -> None:
        """Take the next entry. Of a delta that is there in part, the rest counts. Raises BrokenStream."""
        if isinstance(event, Started) and self.started_ms is None:
            self.started_ms = int(entry_id.partition("-")[0]) / 1000
        elif isinstance(event, Delta):
            self._add_delta(event)

    def _add_delta(self, delta: Delta) -> None:
        known_tokens, known_chars = len(self.token_ids) - delta.index, self.num_chars - delta.at
        if delta.choice != 0 or known_tokens < 0 or known_chars < 0:
            raise BrokenStream(f"the stream goes on at {delta.index}.{delta.at} behind what it holds")
        text = delta.text[known_chars:]
        self.token_ids += delta.token_ids[known_tokens:]
        self.texts.append(text)
        self.num_chars += len(text)
        self.finish_reason = delta.finish_reason or self.finish_reason


async def read_progress(redis: Ranges, keys: Keys, request_id: str) -> Progress:
    """Read the whole stream. Raises BrokenStream, and redis-py's errors."""
    progress, start = Progress(), "-"
    while True:
        entries = await redis.xrange(keys.events(request_id), start, "+", _PAGE)
        for entry_id, fields in entries:
            try:
                event = decode_event(fields)
            except ValueError:
                raise BrokenStream("the stream holds what is no event") from None
            progress.add(entry_id.decode(), event)
        if len(entries) < _PAGE:
            return progress
        start = "(" + entries[-1][0].decode()
