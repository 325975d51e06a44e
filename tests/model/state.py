"""What is known at one moment: by the server, by its replica, by the owners of a job and by its reader.

All of it is tuples, so that states can be compared and kept in sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

QUEUED, STARTED, DELTA = "queued", "started", "delta"
STOP, CANCELLED, DEADLINE, EXHAUSTED = "stop", "cancelled", "deadline", "exhausted"
TERMINAL = frozenset({STOP, CANCELLED, DEADLINE, EXHAUSTED})

#: Of `Job.deadline`.
NO_DEADLINE, AHEAD, PAST = 0, 1, 2
#: A token that nobody has who could still use it.
NOBODY = -1

EntryId = tuple[int, int]
START: EntryId = (0, 0)


class Entry(NamedTuple):
    """A stream's entry.

    `index` and `count` are a delta's tokens, and `reason` is set in its choice's last one; of a `started` they are the
    tokens before it, and the attempt.
    """

    epoch: int
    number: int
    kind: str
    index: int = 0
    count: int = 0
    reason: str = ""

    @property
    def id(self) -> EntryId:
        return self[:2]


class Job(NamedTuple):
    """What the server holds under one id: its keys, and whether it is a member of each set."""

    generation: int = 0  #: of `:job`; 0 if there is none
    attempts: int = 0  #: used up by takeovers
    losses: int = 0  #: takeovers, whether they cost an attempt or not
    deadline: int = NO_DEADLINE
    handed_back_by: int = 0
    queue: bool = False
    running: bool = False
    deadlines: bool = False
    lease: int = 0  #: the holder's token; 0 if it has ended
    cancel: int = 0  #: the generation in the cancel key
    stream: tuple[Entry, ...] = ()

    @property
    def lives(self) -> bool:
        return self.generation != 0

    @property
    def ended(self) -> bool:
        return bool(self.stream) and self.stream[-1].kind in TERMINAL


class Owner(NamedTuple):
    """What a worker remembers of a job that it has claimed."""

    token: int
    epoch: int
    generation: int
    number: int = 0  #: of the last entry that it has made in its epoch
    made: int = 0  #: tokens that it has, its own and earlier owners'
    entered: int = 0  #: tokens that entries hold, as far as it knows
    said: bool = False  #: whether an entry holds why the answer ended
    sent: tuple[Entry, ...] = ()  #: frozen: on their way, or their answer was lost
    hold: str = "held"  #: see `owner`
    ending: str = ""  #: CANCELLED, DEADLINE or "back", once it knows that it has to end so


class Reader(NamedTuple):
    """The fields of a StreamReader that its next step depends on, and the place where another would go on."""

    cursor: EntryId = START
    trusted: EntryId = START
    had: int = 0
    generation: int = 0
    ended: bool = False  #: whether it has yielded why the answer ended
    start: EntryId = START
    furthest: EntryId = START
    position: EntryId = START
    looked: bool = False  #: whether it waits for entries; else it looks at the stream's end first
    rereading: bool = False
    status: str = "reading"  #: then done, replaced or lost; wrong and short are what no reader may come to


class Late(NamedTuple):
    """A command that its sender has given up, and that the server gets all the same."""

    token: int
    entries: tuple[Entry, ...]


class World(NamedTuple):
    """All that concerns one job. Workers are places in `owners`."""

    job: Job
    replica: Job | None  #: what is left after a failover; None when there will be none
    owners: tuple[Owner | None, ...]
    reader: Reader
    late: Late | None = None


class Budget(NamedTuple):
    """How many more accidents of each kind there may be."""

    failovers: int = 0
    crashes: int = 0
    pauses: int = 0  #: leases that end while their owner lives
    losses: int = 0  #: lost replies, lost requests, late commands
    drains: int = 0  #: hand-backs
    resubmissions: int = 0
    resumes: int = 0  #: readers that begin anew at the position of one before


class State(NamedTuple):
    worlds: tuple[World, ...]
    budget: Budget


def epochs_of(world: World) -> set[int]:
    """Every epoch that anybody knows of, the generations among them, and 0."""
    known = {0}
    for job in (world.job, world.replica):
        if job is not None:
            known.update([entry[0] for entry in job.stream])
            known.update((job.generation, job.cancel))
    for owner in world.owners:
        if owner is not None:
            known.update((owner.epoch, owner.generation))
            known.update([entry[0] for entry in owner.sent])
    reader = world.reader
    known.update((reader.cursor[0], reader.trusted[0], reader.generation))
    known.update((reader.start[0], reader.furthest[0], reader.position[0]))
    if world.late is not None:
        known.update([entry[0] for entry in world.late.entries])
    return known


def _ranked(world: World, rank: dict[int, int]) -> World:
    def entries(of: Iterable[Entry]) -> tuple[Entry, ...]:
        return tuple([Entry(rank[e[0]], *e[1:]) for e in of])

    def job(of: Job | None) -> Job | None:
        if of is None:
            return None
        return of._replace(generation=rank[of.generation], cancel=rank[of.cancel], stream=entries(of.stream))

    def owner(of: Owner | None) -> Owner | None:
        if of is None:
            return None
        return of._replace(epoch=rank[of.epoch], generation=rank[of.generation], sent=entries(of.sent))

    def place(of: EntryId) -> EntryId:
        return rank[of[0]], of[1]

    old = world.reader
    return World(
        job(world.job) or Job(),
        job(world.replica),
        tuple([owner(each) for each in world.owners]),
        old._replace(
            cursor=place(old.cursor),
            trusted=place(old.trusted),
            generation=rank[old.generation],
            start=place(old.start),
            furthest=place(old.furthest),
            position=place(old.position),
        ),
        world.late and Late(world.late.token, entries(world.late.entries)),
    )


def _retokened(world: World, names: dict[int, int]) -> World:
    """A token counts only as long as somebody may use it."""

    def job(of: Job | None) -> Job | None:
        if of is None:
            return None
        lease = names.get(of.lease, NOBODY) if of.lease else 0
        return of._replace(lease=lease, handed_back_by=names.get(of.handed_back_by, 0))

    return world._replace(
        job=job(world.job),
        replica=job(world.replica),
        owners=tuple([each and each._replace(token=names[each.token]) for each in world.owners]),
        late=world.late and world.late._replace(token=names[world.late.token]),
    )


def _is_named(job: Job | None, names: dict[int, int]) -> bool:
    if job is None:
        return True
    return (job.lease in names or job.lease in (0, NOBODY)) and (not job.handed_back_by or job.handed_back_by in names)


def canonical_world(world: World, budget: Budget, *, ranks: bool = True) -> World:
    """The same world with the smallest numbers, and without what nothing depends on any more."""
    reader = world.reader
    if reader.status != "reading":
        world = world._replace(reader=Reader(status=reader.status))
    elif not budget.resumes and (reader.furthest != START or reader.position != START):
        world = world._replace(reader=reader._replace(ended=False, furthest=START, position=START))
    if not budget.failovers and world.replica is not None:
        world = world._replace(replica=None)
    tokens = sorted({each.token for each in world.owners if each} | ({world.late.token} if world.late else set()))
    names = {token: number for number, token in enumerate(tokens, 1)}
    if not _is_named(world.job, names) or not _is_named(world.replica, names) or tokens[-1:] not in ([], [len(tokens)]):
        world = _retokened(world, names)
    if ranks:
        known = sorted(epochs_of(world))
        if known != list(range(len(known))):
            world = _ranked(world, {epoch: number for number, epoch in enumerate(known)})
    return world


def canonical(state: State, *, ranks: bool = True) -> State:
    """Workers are alike: which of them it is does not count."""
    worlds = [canonical_world(world, state.budget, ranks=ranks) for world in state.worlds]
    columns = sorted(zip(*[world.owners for world in worlds], strict=True), key=_order)
    worlds = [world._replace(owners=row) for world, row in zip(worlds, zip(*columns, strict=True), strict=True)]
    return State(tuple(worlds), state.budget)


def _order(column: tuple[Owner | None, ...]) -> tuple[tuple[object, ...], ...]:
    return tuple([() if owner is None else owner for owner in column])
