"""A reader as `producer/reader.py` has it, of a stream with one choice whose text is one code point a token."""

from __future__ import annotations

from model.mutations import NONE, Mutation
from model.scripts import Broken
from model.state import DELTA, QUEUED, START, STARTED, TERMINAL, Entry, Reader

READING, DONE, REPLACED, LOST = "reading", "done", "replaced", "lost"
#: What no reader may come to: a token out of turn, or an end before it has what the stream holds.
WRONG, SHORT = "wrong", "short"


def tail(reader: Reader, last: Entry | None, broken: Broken = NONE) -> Reader:
    """After a look at the stream's last entry."""
    if Mutation.READER_NEVER_LOOKS in broken:
        return reader
    if last is None:
        return reader._replace(status=LOST)
    if last.id < reader.cursor:
        return _again(reader)
    if last.id == reader.cursor and last.kind in TERMINAL:
        return reader._replace(status=DONE)
    return reader


def feed(reader: Reader, entries: tuple[Entry, ...], broken: Broken = NONE) -> Reader:
    """After the entries behind its cursor, which one command has read."""
    if not entries:
        return reader
    whole = reader.cursor == START
    reader = reader._replace(rereading=False, trusted=entries[-1].id if whole else reader.trusted)
    for entry in entries:
        reader = _take(reader, entry, whole, broken)
        if reader.rereading or reader.status != READING:
            break
    return reader


def resumed(reader: Reader) -> Reader:
    """Another one, that goes on at its position."""
    place = reader.position
    return Reader(cursor=place, had=reader.had, start=place, furthest=place, position=place)


def _again(reader: Reader) -> Reader:
    return reader._replace(cursor=START, rereading=True)


def _take(reader: Reader, entry: Entry, whole: bool, broken: Broken) -> Reader:
    generation, had, place = reader.generation, reader.had, entry.id
    if entry.kind == QUEUED:
        if not generation and (place <= reader.start or reader.start == START):
            generation = entry.epoch
        if generation != entry.epoch:
            return reader._replace(status=REPLACED)
    if _may_stand_on_something_unseen(reader, entry, broken):
        return reader._replace(status=LOST) if whole and place <= reader.trusted else _again(reader)
    is_new = place > reader.furthest if entry.kind in (QUEUED, STARTED) else True
    status, ended = READING, reader.ended
    if entry.kind == DELTA:
        begins, had = _counted(had, entry, broken)
        status = READING if begins == reader.had or had == reader.had else WRONG
        is_new = had > reader.had or (bool(entry.reason) and not ended and place > reader.start)
        ended = ended or bool(entry.reason)
    elif entry.kind in TERMINAL:
        status = DONE
    return reader._replace(
        cursor=place,
        generation=generation,
        had=had,
        ended=ended,
        furthest=max(reader.furthest, place),
        position=place if is_new else reader.position,
        status=status,
    )


def _may_stand_on_something_unseen(reader: Reader, entry: Entry, broken: Broken) -> bool:
    if reader.cursor != START and entry.epoch != reader.cursor[0] and entry.id > reader.trusted:
        return Mutation.READER_IGNORES_EPOCHS not in broken
    return entry.kind == DELTA and entry.index > reader.had


def _counted(had: int, delta: Entry, broken: Broken) -> tuple[int, int]:
    """Where what it yields of the delta begins, and how many tokens it has then."""
    end = delta.index + delta.count
    if Mutation.READER_YIELDS_WHOLE in broken and end > had:
        return delta.index, end
    if Mutation.READER_SKIPS_PARTS in broken and delta.index < had:
        return had, had
    return max(had, delta.index), max(had, end)
