"""What a reader makes of stream entries: each event once, each token and code point once, in order.

A pure state machine: it is given entries and says what to read next; it knows no connection and no clock. The stream
may be written anew under it (an owner lost its lease, a failover took back what was already read), so it trusts
counts of tokens and code points, and reads the stream again from the start whenever an entry could stand on
something that it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .errors import JobLost, RequestReplaced
from .events import TERMINAL_TYPES, Delta, Event, Failed, Finished, Prompt, Queued, Started, decode_event
from .position import MAX_CHOICES, START, EntryId, Had, Position

Fields = Mapping[bytes, bytes]
Entry = tuple[bytes, Fields]


class Item(NamedTuple):
    """An event, and the position right after it."""

    position: Position
    event: Event


def is_terminal(entry: Entry | None) -> bool:
    """Whether a stream whose last entry this is has come to its end."""
    return entry is not None and entry[1].get(b"t", b"").decode() in TERMINAL_TYPES


def read_event(request_id: str, entry: Entry) -> Event | None:
    """The event of an entry; None for a type this version does not know. Raises JobLost for what cannot be read."""
    try:
        event = decode_event(entry[1])
        if not isinstance(event, Delta) or 0 <= event.choice < MAX_CHOICES:
            return event
    except ValueError:  # what it says may hold generated text, which belongs in no traceback
        pass
    raise JobLost(f"entry {entry[0].decode()} of the stream of {request_id} cannot be read")


class StreamReader:
    """The state of one reader of one request's stream.

    Read the entries after `cursor` (the whole stream in one command when `rereading`), pass them to `feed`, and use up
    what it yields before the next read. When a read brought nothing, show `tail` the last entry. Stop at `done`.
    """

    def __init__(self, request_id: str, position: Position = START) -> None:
        self._request_id = request_id
        self._start = position.entry
        self._furthest = position.entry  # the largest id that was ever processed
        self._trusted = START.entry  # up to here no entry can stand on something that was not seen
        self._generation: int | None = None
        self._has_prompt = False
        self._ended_choices: set[int] = set()
        self._had = list(position.had or START.had or ())
        #: A plain entry id came without counts: what the stream holds up to it is counted, not yielded.
        self._counting_to = position.entry if position.had is None else START.entry
        self.cursor = START.entry if position.had is None else position.entry
        self.rereading = position.had is None
        self.done = False

    def feed(self, entries: Sequence[Entry]) -> Iterator[Item]:
        """The new events among the entries after `cursor`, lazily.

        Raises RequestReplaced, or JobLost for a stream that lacks tokens or cannot be read.
        """
        whole = self.cursor == START.entry
        if entries:
            self.rereading = False
            if whole:  # one command read it, so that nothing can have changed between two of its entries
                self._trusted = EntryId.parse(entries[-1][0])
        for raw_id, fields in entries:
            entry = EntryId.parse(raw_id)
            event = read_event(self._request_id, (raw_id, fields))
            if isinstance(event, Queued):
                self._check_generation(entry, event)
            if self._may_stand_on_something_unseen(entry, event):
                if whole and entry <= self._trusted:
                    raise JobLost(f"the stream of {self._request_id} lacks tokens before entry {entry}")
                self._read_again()
                return
            new = self._new_part(entry, event) if event else None
            self.cursor = entry
            self._furthest = max(self._furthest, entry)
            self.done = isinstance(event, Finished | Failed)
            if new:
                yield Item(Position(entry, tuple(self._had)), new)
            if self.done:
                return

    def tail(self, last: Entry | None) -> None:
        """Look at the stream's last entry, after a read that brought nothing or before the first one.

        Raises JobLost when there is none: the stream is gone.
        """
        if last is None:
            raise JobLost(f"the stream of {self._request_id} is gone: it has expired, or Redis lost it")
        entry = EntryId.parse(last[0])
        if entry < self.cursor:
            self._read_again()
        elif entry == self.cursor and is_terminal(last):
            self.done = True

    def _read_again(self) -> None:
        self.cursor = START.entry
        self.rereading = True

    def _check_generation(self, entry: EntryId, event: Queued) -> None:
        """A second `queued`: another job has taken the id. Re-reading brings the first one again."""
        if self._generation is None and (entry <= self._start or self._start == START.entry):
            self._generation = event.generation
        if self._generation != event.generation:
            raise RequestReplaced(f"another job has begun under the id {self._request_id}")

    def _may_stand_on_something_unseen(self, entry: EntryId, event: Event | None) -> bool:
        """Another epoch means another owner, who may have continued from a shorter stream; a gap means it outright."""
        if self.cursor != START.entry and entry.epoch != self.cursor.epoch and entry > self._trusted:
            return True
        if not isinstance(event, Delta):
            return False
        had = self._of(event.choice)
        return event.index > had.tokens or event.at > had.points

    def _new_part(self, entry: EntryId, event: Event) -> Event | None:
        """What of the event the reader does not have yet, which it then has."""
        known = entry <= self._counting_to
        match event:
            case Delta():
                new = self._rest(entry, event)
                return None if known else new
            case Prompt():
                first, self._has_prompt = not self._has_prompt, True
                return event if first and entry > self._start else None
            case Queued() | Started():
                return event if entry > self._furthest else None
            case Finished() | Failed():
                return None if known else event

    def _rest(self, entry: EntryId, delta: Delta) -> Delta | None:
        had = self._of(delta.choice)
        tokens, points = had.tokens - delta.index, had.points - delta.at
        token_ids, text = delta.token_ids[tokens:], delta.text[points:]
        finish_reason = None if delta.choice in self._ended_choices else delta.finish_reason
        if finish_reason:
            self._ended_choices.add(delta.choice)
        if not token_ids and not text and (finish_reason is None or entry <= self._start):
            return None
        self._had[delta.choice] = Had(had.tokens + len(token_ids), had.points + len(text))
        if not tokens and not points and finish_reason == delta.finish_reason:
            return delta
        return delta.model_copy(
            update={
                "index": had.tokens,
                "at": had.points,
                "text": text,
                "token_ids": token_ids,
                "logprobs": None if delta.logprobs is None else delta.logprobs[tokens:],
                "finish_reason": finish_reason,
            }
        )

    def _of(self, choice: int) -> Had:
        self._had += [Had(0, 0)] * (choice + 1 - len(self._had))
        return self._had[choice]
