"""An owner as the worker has it: what it sends next, and what an answer changes.

`Owner.hold` is what it has of its stream: "held"; "lost", until it has the job again; "regained", when it has but has
not read what the stream holds; "returning", when that is more than it has made itself; "unknown" for a claim whose
reply was lost. `made` is UNREAD for one that took over and has not read the stream yet.
"""

from __future__ import annotations

from model.mutations import NONE, Mutation
from model.scripts import OK, Broken, published
from model.state import CANCELLED, DELTA, STOP, TERMINAL, Entry, EntryId, Owner

HELD, LOST, REGAINED, RETURNING, UNKNOWN = "held", "lost", "regained", "returning", "unknown"
UNREAD = -1
BACK = "back"


def expected(owner: Owner) -> EntryId:
    return owner.epoch, owner.number


def reason(owner: Owner, length: int) -> str:
    """Why its answer is over; "" while it is not. `length` is how many tokens the whole one has."""
    if owner.made == length:
        return STOP
    return "" if owner.ending == BACK else owner.ending


def is_closing(owner: Owner) -> bool:
    """Its last entries are under way: nothing else may be."""
    return bool(owner.sent) and owner.sent[-1].kind in TERMINAL


def to_publish(owner: Owner, length: int, broken: Broken = NONE) -> tuple[Entry, ...]:
    """The next call of publish; nothing if there is none."""
    if owner.hold != HELD or owner.made == UNREAD or is_closing(owner):
        return ()
    if owner.sent:
        if Mutation.RETRY_WITH_OTHER_BYTES in broken and owner.made > owner.entered:
            (old,) = owner.sent
            return (old._replace(count=owner.made - old.index, reason=reason(owner, length)),)
        return owner.sent
    return _rest(owner, length)


def to_finish(owner: Owner, length: int) -> tuple[Entry, ...]:
    """The call of finish: what has no answer yet, what no entry holds yet, and the end."""
    if owner.hold != HELD or owner.made == UNREAD:
        return ()
    if is_closing(owner):
        return owner.sent
    kind = reason(owner, length)
    if not kind:
        return ()
    rest = _rest(owner, length)
    return (*owner.sent, *rest, Entry(owner.epoch, owner.number + len(rest) + 1, kind))


def _rest(owner: Owner, length: int) -> tuple[Entry, ...]:
    why = reason(owner, length)
    if owner.made == owner.entered and (owner.said or not why):
        return ()
    return (Entry(owner.epoch, owner.number + 1, DELTA, owner.entered, owner.made - owner.entered, why),)


def frozen(owner: Owner, entries: tuple[Entry, ...]) -> Owner:
    """It has sent the entries, and has no answer."""
    entered, said = owner.entered, owner.said
    for entry in entries:
        if entry.kind == DELTA:
            entered, said = entry.index + entry.count, bool(entry.reason)
    return owner._replace(number=entries[-1].number, entered=entered, said=said, sent=entries)


def answered(owner: Owner, entries: tuple[Entry, ...], outcome: str) -> Owner:
    """Of publish, or of a finish that was refused."""
    owner = frozen(owner, entries)
    return owner._replace(sent=()) if outcome == OK else lost(owner)


def lost(owner: Owner) -> Owner:
    """Nothing is sent until the stream is got back; what was under way has no answer that counts."""
    return owner._replace(hold=LOST, sent=(), number=0) if owner.hold == HELD else owner


def told(owner: Owner, answer: str, length: int) -> Owner:
    """By a renewal, or by the cancellation's doorbell, which asks the same."""
    if answer == "lost":
        return lost(owner)
    return stopped(owner, CANCELLED, length) if answer == CANCELLED else owner


def stopped(owner: Owner, why: str, length: int) -> Owner:
    """Nothing further is generated. After a cancellation, what no entry holds is forgotten."""
    if owner.ending or owner.made == length:
        return owner
    made = owner.entered if why == CANCELLED and owner.made != UNREAD else owner.made
    return owner._replace(ending=why, made=made)


def restored(owner: Owner, stream: tuple[Entry, ...]) -> Owner:
    """It has read what earlier owners have published, and whether that is all."""
    tokens, why = published(stream), why_it_ended(stream)
    ending = owner.ending or ("" if why == STOP else why)
    return owner._replace(made=tokens, entered=tokens, said=bool(why), ending=ending)


def restarted(owner: Owner, stream: tuple[Entry, ...], length: int, broken: Broken = NONE) -> Owner:
    """It has read what the stream holds that it has again."""
    tokens, why, made = published(stream), why_it_ended(stream), max(owner.made, 0)
    is_more = tokens > made and Mutation.OWNER_TRUSTS_ITSELF not in broken
    own = (reason(owner, length), made)
    is_other = bool(why) and own != (why, tokens) and Mutation.GOES_ON_BEHIND_THE_END not in broken
    if is_more or is_other:
        return owner._replace(hold=RETURNING)
    return owner._replace(hold=HELD, entered=min(tokens, made), said=bool(why), number=0, sent=())


def why_it_ended(stream: tuple[Entry, ...]) -> str:
    """What the last delta says of the answer's end."""
    for entry in reversed(stream):
        if entry.kind == DELTA and entry.reason:
            return entry.reason
    return ""
