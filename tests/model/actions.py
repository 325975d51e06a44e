"""Who may do what next: every step from a state, be it work, a wish of a client's or an accident.

A step of work is one that goes on happening by itself as long as workers and readers live; that an end stays within
reach is asked of those alone. Accidents use up the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from model import owner as owners
from model import reader as readers
from model import scripts
from model.mutations import NONE, Mutation
from model.owner import BACK, HELD, LOST, REGAINED, RETURNING, UNKNOWN, UNREAD
from model.scripts import OK, Limits
from model.state import (
    AHEAD,
    DEADLINE,
    PAST,
    QUEUED,
    STARTED,
    STOP,
    Budget,
    Entry,
    Job,
    Late,
    Owner,
    Reader,
    State,
    World,
    canonical,
    epochs_of,
)


class Config(NamedTuple):
    """What is searched: how many of each, and what may happen."""

    jobs: int = 1
    workers: int = 2
    tokens: int = 2
    slots: int = 1  #: of a worker
    limits: Limits = Limits(max_attempts=2, free_losses=1)
    budget: Budget = Budget()
    deadline: bool = False
    cancels: bool = True
    clock_back: bool = False  #: the new primary's clock may be behind the old one's
    lost_enqueue: bool = False  #: the replica may lack the job altogether
    read_by_one: bool = False  #: a reader may get less than there is


class Step(NamedTuple):
    name: str
    number: int  #: of the world that it concerns
    who: int  #: of the worker, or -1
    reply: object
    before: World
    after: World
    works: bool
    budget: Budget


class _Change(NamedTuple):
    """A step, before it is known where in the state it belongs."""

    name: str
    who: int
    reply: object
    after: World
    works: bool = True
    costs: str = ""


class Model:
    def __init__(self, config: Config, broken: scripts.Broken = NONE) -> None:
        self.config = config
        self.broken = broken

    def initial(self) -> State:
        _, job = scripts.enqueue(Job(), 1, deadline=self.config.deadline)
        replica = Job() if self.config.lost_enqueue else job
        world = World(job, replica, (None,) * self.config.workers, Reader())
        return self.canonical(State((world,) * self.config.jobs, self.config.budget))

    def canonical(self, state: State) -> State:
        return canonical(state, ranks=Mutation.COUNTED_EPOCHS not in self.broken)

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for number, world in enumerate(state.worlds):
            for change in self._changes(state, number, world):
                budget = state.budget
                if change.costs:
                    budget = budget._replace(**{change.costs: getattr(budget, change.costs) - 1})
                worlds = (*state.worlds[:number], change.after, *state.worlds[number + 1 :])
                step = Step(change.name, number, change.who, change.reply, world, change.after, change.works, budget)
                yield step, self.canonical(State(worlds, budget))
        yield from self._accidents(state)

    def _accidents(self, state: State) -> Iterator[tuple[Step, State]]:
        """What happens to all jobs at once."""
        first, budget = state.worlds[0], state.budget

        def step(name: str, who: int, worlds: tuple[World, ...], left: Budget) -> tuple[Step, State]:
            return Step(name, -1, who, None, first, worlds[0], False, left), self.canonical(State(worlds, left))

        if budget.crashes:
            for who in range(self.config.workers):
                if any(world.owners[who] for world in state.worlds):
                    worlds = tuple(_with_owner(world, who, None) for world in state.worlds)
                    yield step("crash", who, worlds, budget._replace(crashes=budget.crashes - 1))
        if budget.failovers and any(world.replica != world.job for world in state.worlds):
            worlds = tuple(world._replace(replica=world.job) for world in state.worlds)
            yield step("replicate", -1, worlds, budget)
            worlds = tuple(self._failed_over(world) for world in state.worlds)
            yield step("failover", -1, worlds, budget._replace(failovers=budget.failovers - 1))

    @staticmethod
    def _failed_over(world: World) -> World:
        """The replica's state is everybody's, and every connection is a new one."""
        return world._replace(job=world.replica or Job(), late=None, reader=world.reader._replace(looked=False))

    def _changes(self, state: State, number: int, world: World) -> Iterator[_Change]:
        epochs = self._epochs(world)
        yield from self._clients(world, epochs, state.budget)
        yield from self._time(world, state.budget)
        yield from self._reading(world, state.budget)
        for who, owner in enumerate(world.owners):
            if owner is not None:
                yield from self._owner(world, who, owner, epochs, state.budget)
            elif sum(each.owners[who] is not None for each in state.worlds) < self.config.slots:
                yield from self._claim(world, who, epochs, state.budget)
        if world.late is not None:
            outcome, job = scripts.send(world.job, world.late.token, world.late.entries, self.broken)
            yield _Change("late", -1, outcome, world._replace(job=job, late=None), works=False)

    def _epochs(self, world: World) -> list[int | float]:
        """What the next epoch may be: never one that was there before, and above all that the stream holds."""
        last = world.job.stream[-1].epoch if world.job.stream else 0
        if Mutation.COUNTED_EPOCHS in self.broken:
            return [last + 1]
        known = sorted(epochs_of(world))
        if not self.config.clock_back:
            return [known[-1] + 1]
        return [each + 0.5 for each in known if each >= last]

    # ---- clients, and whoever ends what nobody runs ----

    def _clients(self, world: World, epochs: list[float], budget: Budget) -> Iterator[_Change]:
        job = world.job
        if not job.lives and budget.resubmissions:
            for epoch in epochs:
                reply, after = scripts.enqueue(job, epoch, deadline=self.config.deadline)
                yield _Change("enqueue", -1, reply, world._replace(job=after), works=False, costs="resubmissions")
        for epoch in epochs if self.config.cancels else ():
            answer, after = scripts.cancel(job, epoch, self.broken)
            if after != job:
                yield _Change("cancel", -1, answer, world._replace(job=after), works=False)
        for epoch in epochs:
            ended, after = scripts.expire(job, epoch, self.broken)
            if ended:
                yield _Change("expire", -1, ended, world._replace(job=after))

    def _time(self, world: World, budget: Budget) -> Iterator[_Change]:
        job, replica = world.job, world.replica
        if job.lives and job.deadline == AHEAD:
            if replica and replica.deadline == AHEAD:
                replica = replica._replace(deadline=PAST)
            yield _Change("deadline", -1, None, world._replace(job=job._replace(deadline=PAST), replica=replica), False)
        if job.lease:
            lives = any(owner and owner.token == job.lease for owner in world.owners)
            if lives and not budget.pauses:
                return
            # A lease's end is a time: it is the same on the replica, as long as the clocks agree.
            if replica and replica.lease == job.lease and not self.config.clock_back:
                replica = replica._replace(lease=0)
            after = world._replace(job=job._replace(lease=0), replica=replica)
            yield _Change("lapse", -1, None, after, works=not lives, costs="pauses" if lives else "")

    # ---- workers ----

    def _claim(self, world: World, who: int, epochs: list[float], budget: Budget) -> Iterator[_Change]:
        job = world.job
        if not scripts.can_be_claimed(job, self.broken):
            return
        token = _new_token(world)
        for epoch in epochs:
            for grace in (False, True) if not job.queue else (False,):
                reply, after = scripts.claim(
                    job, token, epoch, grace=grace, limits=self.config.limits, broken=self.broken
                )
                name = "claim in grace" if grace else "claim"
                if reply != STARTED:
                    yield _Change(name, who, reply, world._replace(job=after))
                    continue
                owner = _owner_of(job, token, epoch)
                yield _Change(name, who, reply, _with_owner(world, who, owner)._replace(job=after))
                if budget.losses:
                    unknown = Owner(token, 0, job.generation, hold=UNKNOWN)
                    waits = _with_owner(world, who, unknown)._replace(job=after)
                    yield _Change(f"{name}, reply lost", who, reply, waits, False, "losses")
                    yield _Change(f"{name}, late", who, reply, world._replace(job=after), False, "losses")

    def _claim_again(
        self, world: World, who: int, owner: Owner, epochs: list[float], budget: Budget
    ) -> Iterator[_Change]:
        """A worker that does not know what its last claim took names that one's token in the next."""
        job = world.job
        if job.lease != owner.token:
            forgotten = _with_owner(world, who, None)
            yield _Change("forget the claim", who, None, forgotten)
            yield from self._claim(forgotten, who, epochs, budget)
            return
        token = _new_token(world)
        for epoch in epochs:
            reply, after = scripts.take_back(job, owner.token, token, epoch, self.broken)
            new = _owner_of(job, token, epoch) if reply == STARTED else None
            yield _Change("take back", who, reply, _with_owner(world, who, new)._replace(job=after))

    def _owner(self, world: World, who: int, owner: Owner, epochs: list[float], budget: Budget) -> Iterator[_Change]:
        if owner.hold == UNKNOWN:
            yield from self._claim_again(world, who, owner, epochs, budget)
            return
        yield from self._alone(world, who, owner, budget)
        if owner.hold == HELD:
            yield from self._sends(world, who, owner, budget)
            settled = not owners.to_publish(owner, self.config.tokens) and owner.made != UNREAD
            if owner.ending == BACK and settled:
                yield from self._hand_back(world, who, owner, epochs, budget)
        elif owner.hold == LOST:
            yield from self._reacquire(world, who, owner, epochs, budget)
        elif owner.hold == RETURNING:
            yield from self._return(world, who, owner, epochs, budget)

    def _alone(self, world: World, who: int, owner: Owner, budget: Budget) -> Iterator[_Change]:
        """What changes only what it remembers."""

        def own(name: str, after: Owner, reply: object = None) -> _Change:
            return _Change(name, who, reply, _with_owner(world, who, after))

        job, length = world.job, self.config.tokens
        if 0 <= owner.made < length and not owner.ending and owner.hold != RETURNING:
            yield own("generate", owner._replace(made=owner.made + 1))
        answer = scripts.renew(job, owner.token)
        told = owners.told(owner, answer, length)
        if told != owner:
            yield own("renew", told, answer)
        if job.deadline == PAST and not owner.ending and owner.made < length:
            yield own("its deadline", owners.stopped(owner, DEADLINE, length))
        if owner.made == UNREAD:
            yield own("read the stream", owners.restored(owner, job.stream))
        if owner.hold == REGAINED:
            yield own("read it again", owners.restarted(owner, job.stream, length, self.broken))
        if budget.drains and not owner.ending and owner.made < length:
            yield own("drain", owner._replace(ending=BACK))._replace(works=False, costs="drains")

    def _sends(self, world: World, who: int, owner: Owner, budget: Budget) -> Iterator[_Change]:
        publish = owners.to_publish(owner, self.config.tokens, self.broken)
        finish = owners.to_finish(owner, self.config.tokens)
        for name, entries in (("publish", publish), ("finish", finish)):
            if not entries:
                continue
            outcome, job = scripts.send(world.job, owner.token, entries, self.broken)
            ended = name == "finish" and outcome == OK
            after = None if ended else owners.answered(owner, entries, outcome)
            yield _Change(name, who, outcome, _with_owner(world, who, after)._replace(job=job))
            if budget.losses and not owner.sent:
                waits = _with_owner(world, who, owners.frozen(owner, entries))
                yield from _lost(name, who, outcome, world, waits, job)
                if world.late is None:
                    late = waits._replace(late=Late(owner.token, entries))
                    yield _Change(f"{name}, under way", who, None, late, False, "losses")

    def _hand_back(
        self, world: World, who: int, owner: Owner, epochs: list[float], budget: Budget
    ) -> Iterator[_Change]:
        for epoch in self._if_it_ends(world, owner, epochs):
            outcome, job = scripts.hand_back(world.job, owner.token, owners.expected(owner), epoch, self.broken)
            after = None if outcome == OK else owners.lost(owner)
            yield _Change("hand back", who, outcome, _with_owner(world, who, after)._replace(job=job))
            if budget.losses:
                yield from _lost("hand back", who, outcome, world, world, job)

    def _return(self, world: World, who: int, owner: Owner, epochs: list[float], budget: Budget) -> Iterator[_Change]:
        """It has less than the stream: it gives the job back, whatever the answer."""
        for epoch in self._if_it_ends(world, owner, epochs):
            outcome, job = scripts.hand_back(world.job, owner.token, owners.expected(owner), epoch, self.broken)
            yield _Change("return", who, outcome, _with_owner(world, who, None)._replace(job=job))
            if budget.losses:
                waits = _with_owner(world, who, owner._replace(hold=LOST))
                yield from _lost("return", who, outcome, world, waits, job)

    def _if_it_ends(self, world: World, owner: Owner, epochs: list[float]) -> list[float]:
        """A hand-back takes an epoch only if it ends the job."""
        return epochs if scripts.is_cancelled(world.job) or world.job.deadline == PAST else epochs[:1]

    def _reacquire(
        self, world: World, who: int, owner: Owner, epochs: list[float], budget: Budget
    ) -> Iterator[_Change]:
        for epoch in epochs:
            got, job = scripts.reacquire(world.job, owner.token, owner.generation, owner.epoch, epoch, self.broken)
            if got is None:
                yield _Change("drop", who, None, _with_owner(world, who, None))
                return
            after = owner._replace(hold=REGAINED, epoch=got, number=0)
            yield _Change("reacquire", who, got, _with_owner(world, who, after)._replace(job=job))
            if budget.losses:
                yield _Change("reacquire, reply lost", who, got, world._replace(job=job), False, "losses")

    # ---- the reader ----

    def _reading(self, world: World, budget: Budget) -> Iterator[_Change]:
        reader = world.reader
        if reader.status == readers.READING:
            for name, after in self._reads(reader, world.job.stream):
                if after.status == readers.DONE:
                    after = after._replace(status=_end(after, world.job.stream, self.config.tokens))
                yield _Change(name, -1, after.status, world._replace(reader=after))
            others = {"reader resumes": readers.resumed(reader)}
        else:
            others = {"reader begins": Reader()}
        if budget.resumes:
            for name, after in others.items():
                yield _Change(name, -1, after.status, world._replace(reader=after), works=False, costs="resumes")

    def _reads(self, reader: Reader, stream: tuple[Entry, ...]) -> Iterator[tuple[str, Reader]]:
        news = tuple([entry for entry in stream if entry[:2] > reader.cursor])
        if reader.rereading or not reader.looked:
            looked = readers.tail(reader, stream[-1] if stream else None, self.broken)
            if looked.status == readers.READING and looked.cursor == reader.cursor:
                looked = readers.feed(looked._replace(looked=True), news, self.broken)
            if looked != reader:
                yield "look", looked
        elif news:
            yield "read", readers.feed(reader, news, self.broken)
            if self.config.read_by_one and len(news) > 1:
                yield "read one", readers.feed(reader, news[:1], self.broken)
        else:
            yield "nothing comes", reader._replace(looked=False)


def _end(reader: Reader, stream: tuple[Entry, ...], length: int) -> str:
    """Who has at least what the stream holds has the answer, and all of it if it was generated to its end."""
    needed = length if stream[-1].kind == STOP else scripts.published(stream)
    return readers.DONE if reader.had >= needed else readers.SHORT


def _new_token(world: World) -> int:
    used = [each.token for each in world.owners if each] + [world.late.token if world.late else 0]
    for job in (world.job, world.replica):
        if job is not None:
            used += [job.lease, job.handed_back_by]
    return 1 + max(used)


def _owner_of(job: Job, token: int, epoch: int) -> Owner:
    """By a claim of that job. Who is not its first owner reads the stream before anything else."""
    resumed = job.stream[-1].kind != QUEUED
    return Owner(token, epoch, job.generation, made=UNREAD if resumed else 0)


def _with_owner(world: World, who: int, owner: Owner | None) -> World:
    return world._replace(owners=(*world.owners[:who], owner, *world.owners[who + 1 :]))


def _lost(name: str, who: int, outcome: object, world: World, waits: World, after: Job) -> Iterator[_Change]:
    """The command is lost, or its reply: in both cases the sender `waits`, and will send it again."""
    if after != world.job:
        yield _Change(f"{name}, reply lost", who, outcome, waits._replace(job=after), False, "losses")
    if waits != world:
        yield _Change(f"{name}, request lost", who, None, waits, False, "losses")
