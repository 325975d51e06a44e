"""What must hold of a job and of the order, in numbers alone: what the state machine compares the scripts with."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferq.worker.commands import Claimed, Entry
from support.wire import following

WAITING, LEASED, LAPSED, ENDED, ABSENT = "waiting", "leased", "lapsed", "ended", "absent"
MAX_ATTEMPTS = 3
FREE_LOSSES = 10


@dataclass
class Job:
    """What the model knows of an id. `place` is its virtual finish; a plain producer's job has none before a claim."""

    state: str = ABSENT
    stream: list[str] = field(default_factory=list)
    place: int | None = None
    owner: str | None = None
    handed_back_by: str | None = None
    attempts: int = 0
    losses: int = 0
    tokens: int = 0
    plain: bool = False
    cancel_key: bool = False
    armed: bool = False
    watched: bool = False
    has_reader: bool = False
    overdue: bool = False
    has_deadline: bool = False
    has_payload: bool = True

    @property
    def lives(self) -> bool:
        return self.state in (WAITING, LEASED, LAPSED)

    @property
    def cancelled(self) -> bool:
        return self.cancel_key or (self.armed and not self.has_reader)

    @property
    def ending(self) -> str | None:
        """The terminal entry that it gets from whoever comes for it, if it has to end."""
        if self.cancelled or self.overdue:
            return "finished"
        return None if self.has_payload else "failed"

    def adopt(self) -> None:
        if self.plain:
            self.plain, self.stream = False, ["queued"]

    def end(self, kind: str) -> None:
        self.__init__(state=ENDED, stream=[*self.stream, kind])

    def keys(self) -> set[str]:
        """What exists of it besides its stream."""
        if not self.lives:
            return set()
        present = {
            "queue": self.state == WAITING,
            "running": self.state != WAITING,
            "job": not self.plain,
            "payload": self.has_payload,
            "lease": self.state == LEASED,
            "cancel": self.cancel_key,
            "reader": self.has_reader,
            "deadlines": self.has_deadline or self.armed,
        }
        return {name for name, there in present.items() if there}


@dataclass
class Owner:
    """Somebody who once claimed a job: what it would append next, and its last entry, for a repeat."""

    job: Claimed
    written: int = 0
    last: Entry | None = None

    def next(self, kind: str) -> Entry:
        return following(self.job, self.written + 1, kind=kind)


class Places:
    """The virtual time of the one tenant that all jobs here are of; each job costs 1."""

    def __init__(self) -> None:
        self.now, self.last = 0, None

    def next(self) -> int:
        self.last = max(self.now, self.last or 0) + 1
        return self.last

    def refund(self) -> None:
        if self.last is not None:
            self.last -= 1

    def served(self, place: int) -> None:
        self.now = max(self.now, place)

    def forget(self) -> None:
        """What lies behind the virtual time."""
        if self.last is not None and self.last <= self.now:
            self.last = None


class QueueModel:
    """All jobs of one model, and what each script does to them."""

    def __init__(self, ids: tuple[str, ...]) -> None:
        self.jobs = {request_id: Job() for request_id in ids}
        self.places = Places()
        self.unplaced: list[str] = []
        self.dead: list[str] = []

    def holds(self, owner: Owner) -> bool:
        job = self.jobs[owner.job.request_id]
        return job.state == LEASED and job.owner == owner.job.token

    def order(self) -> list[str]:
        waiting = [each for each, job in self.jobs.items() if job.state == WAITING and job.place is not None]
        return sorted(waiting, key=lambda each: (self.jobs[each].place, each)) + self.unplaced

    def settle(self, request_id: str, kind: str, *, dies: bool = False) -> None:
        job = self.jobs[request_id]
        if dies:
            self.dead.append(request_id)
        if request_id in self.unplaced:
            self.unplaced.remove(request_id)
        elif job.state == WAITING:
            self.places.refund()
        job.end(kind)
        if not any(each.lives for each in self.jobs.values()):
            self.places = Places()

    def take_back(self, lost_tokens: list[str], exclude: set[str]) -> list[str]:
        """What calls took whose replies were lost, in the order of the ids."""
        taken: list[str] = []
        for request_id, job in self.jobs.items():
            if job.owner not in lost_tokens or request_id in exclude:
                continue
            if job.ending:
                self.settle(request_id, job.ending)
            else:
                taken.append(request_id)
        return taken

    def take_lapsed(self, slots: int, grace: bool, exclude: set[str]) -> list[str]:
        taken: list[str] = []
        for request_id, job in self.jobs.items():
            if job.state != LAPSED or request_id in exclude:
                continue
            attempts = job.attempts + (not grace or job.losses >= FREE_LOSSES)
            if job.ending:
                self.settle(request_id, job.ending)
            elif attempts >= MAX_ATTEMPTS:
                self.settle(request_id, "failed", dies=True)
            elif len(taken) < slots:
                job.attempts, job.losses = attempts, job.losses + 1
                taken.append(request_id)
        return taken

    def place_plain(self, accepted: bool) -> None:
        for request_id in list(self.unplaced):
            job = self.jobs[request_id]
            job.adopt()
            if accepted:
                self.unplaced.remove(request_id)
                job.place = self.places.next()
            else:
                self.settle(request_id, "failed")

    def take_waiting(self, slots: int, exclude: set[str]) -> list[str]:
        taken: list[str] = []
        for request_id in [each for each in self.order() if each not in exclude]:
            if len(taken) >= slots:
                break
            job = self.jobs[request_id]
            if job.ending:
                self.settle(request_id, job.ending)
            else:
                taken.append(request_id)
                job.state = LEASED
        for request_id in taken:
            self.places.served(self.jobs[request_id].place)
        if taken:
            self.places.forget()
        return taken

    def check_claimed(self, claimed: Claimed) -> None:
        job = self.jobs[claimed.request_id]
        assert claimed.attempt == job.attempts + 1
        assert claimed.resumed is (job.stream != ["queued"])
        assert claimed.resumed_tokens == (job.tokens,)
        job.state, job.owner = LEASED, claimed.token
        job.stream.append("started")
