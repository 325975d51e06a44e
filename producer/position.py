"""Where a reader is in a stream: an entry id and, for each choice, what the reader has of it.

The counts make a position exact when the stream behind it was written anew after a failover: a reader that comes back
gets the rest, whatever entries it is cut into. As text a position fits into an SSE `Last-Event-ID`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from .errors import InvalidRequest

MAX_CHOICES: Final = 128
_MAX_PART: Final = 2**64 - 1  # what Redis takes for either half of an entry id
_PATTERN: Final = re.compile(r"(\d{1,20})-(\d{1,20})(?::(\d{1,10}\.\d{1,10}(?:,\d{1,10}\.\d{1,10})*))?\Z", re.ASCII)


class EntryId(NamedTuple):
    """A stream entry's id. Each owner of a job writes in an epoch of its own, larger than the one before."""

    epoch: int
    number: int

    @classmethod
    def parse(cls, raw: bytes | str) -> EntryId:
        epoch, _, number = (raw if isinstance(raw, str) else raw.decode()).partition("-")
        return cls(int(epoch), int(number))

    def __str__(self) -> str:
        return f"{self.epoch}-{self.number}"


class Had(NamedTuple):
    """How much of one choice a reader has: tokens, and code points of its text."""

    tokens: int
    points: int


@dataclass(frozen=True, slots=True)
class Position:
    """`entry` is the last entry read. `had` has an item a choice; None stands for all that the stream holds up to it.

    The text is `0` for the start, `1764000000000000-7:42.180,40.171`, or an entry id alone.
    """

    entry: EntryId
    had: tuple[Had, ...] | None

    @classmethod
    def parse(cls, text: str) -> Position:
        """Raises InvalidRequest for what is not a position."""
        if text in ("0", "0-0"):
            return START
        match = _PATTERN.match(text)
        entry = EntryId(int(match[1]), int(match[2])) if match else EntryId(0, 0)
        if not match or max(entry) > _MAX_PART:
            raise InvalidRequest("position must be 0, an entry id, or a position that this client gave")
        if match[3] is None:
            return cls(entry, None)
        had = tuple(Had(*map(int, each.split("."))) for each in match[3].split(","))
        if len(had) > MAX_CHOICES:
            raise InvalidRequest(f"position names {len(had)} choices; at most {MAX_CHOICES} are possible")
        return cls(entry, had)

    def __str__(self) -> str:
        if self == START:
            return "0"
        if self.had is None:
            return str(self.entry)
        return f"{self.entry}:{','.join(f'{had.tokens}.{had.points}' for had in self.had)}"


START: Final = Position(EntryId(0, 0), (Had(0, 0),))
