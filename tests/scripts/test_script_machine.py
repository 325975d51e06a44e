"""Any sequence of commands, by producers, several owners and accidents, against a small model of what must hold.

The scripts and the server are real. The model knows of each id its state, what its stream holds and who owns it;
every answer is predicted, and after each step the whole database is compared with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.wire import Wire, following

from inferq.producer.errors import DuplicateRequest, QueueFull
from inferq.worker.commands import Claimed, Entry, Renewed

T = TypeVar("T")
IDS = ("a", "b", "c", "d")
MAX_BACKLOG = 3
TERMINAL = ("finished", "failed")
WAITING, LEASED, LAPSED, ENDED, ABSENT = "waiting", "leased", "lapsed", "ended", "absent"

request_ids = st.sampled_from(IDS)


@dataclass
class Job:
    """What the model knows of an id."""

    state: str = ABSENT
    stream: list[str] = field(default_factory=list)
    owner: str | None = None
    plain: bool = False
    cancelled: bool = False
    overdue: bool = False
    has_deadline: bool = False
    has_payload: bool = True

    @property
    def lives(self) -> bool:
        return self.state in (WAITING, LEASED, LAPSED)

    def end(self, kind: str) -> None:
        self.__init__(state=ENDED, stream=[*self.stream, kind])


@dataclass
class Owner:
    """Somebody who once claimed a job: what it would append next, and its last entry, for a repeat."""

    job: Claimed
    written: int = 0
    last: Entry | None = None

    def next(self, kind: str) -> Entry:
        return following(self.job, self.written + 1, kind=kind)


class Protocol(RuleBasedStateMachine):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.wire = Wire(redis.asyncio.Redis.from_url(url))
        self.run(self.wire.redis.flushdb())
        self.jobs = {request_id: Job() for request_id in IDS}
        self.order: list[str] = []
        self.owners: list[Owner] = []
        self.tops: dict[str, tuple[int, int]] = {}

    def run(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self.runner.run(awaited())

    def teardown(self) -> None:
        self.run(self.wire.redis.aclose())
        self.runner.close()

    # What producers do.

    @rule(request_id=request_ids, deadline=st.booleans())
    def enqueue(self, request_id: str, deadline: bool) -> None:
        job = self.jobs[request_id]
        options = {"deadline_ms": 3_600_000 if deadline else None, "max_backlog": MAX_BACKLOG}
        if job.lives:
            with pytest.raises(DuplicateRequest):
                self.run(self.wire.enqueue(request_id, **options))
        elif len(self.order) >= MAX_BACKLOG:
            with pytest.raises(QueueFull):
                self.run(self.wire.enqueue(request_id, **options))
        else:
            accepted = self.run(self.wire.enqueue(request_id, **options))
            assert accepted.position == len(self.order)
            self.order.append(request_id)
            self.jobs[request_id] = Job(WAITING, ["queued"], has_deadline=deadline)

    @rule(request_id=request_ids)
    def enqueue_plain(self, request_id: str) -> None:
        if self.jobs[request_id].lives:
            return  # arq's client looks for the payload, as ours does
        self.run(self.wire.enqueue_plain(request_id))
        self.order.append(request_id)
        self.jobs[request_id] = Job(WAITING, self.jobs[request_id].stream, plain=True)

    @rule(request_id=request_ids)
    def cancel(self, request_id: str) -> None:
        job = self.jobs[request_id]
        outcome = self.run(self.wire.producer.cancel(request_id))
        if job.state == LEASED:
            assert outcome == "requested"
            job.cancelled = True
        elif job.plain and not job.has_payload:
            # Nothing but its place in the queue is left; the next claim tells whoever waits.
            assert outcome == ("finished" if job.stream else "unknown")
        elif job.lives:
            assert outcome == "cancelled"
            self.adopt(job)
            self.settle(request_id, "finished")
        else:
            assert outcome == ("finished" if job.state == ENDED else "unknown")

    # What workers do.

    @rule(slots=st.integers(0, 4), sweep=st.booleans(), plain=st.booleans(), exclude=st.sets(request_ids, max_size=2))
    def claim(self, slots: int, sweep: bool, plain: bool, exclude: set[str]) -> None:
        claimed = self.run(self.wire.claim(slots, sweep=sweep, accept_plain=plain, exclude=exclude))
        if sweep:
            for request_id in IDS:
                if self.jobs[request_id].state == LAPSED and request_id not in exclude:
                    self.settle(request_id, self.ending(request_id) or "failed")
        expected = []
        for request_id in [each for each in self.order if each not in exclude]:
            if len(expected) == slots:
                break
            job = self.jobs[request_id]
            kind = self.ending(request_id)
            if kind is None and job.plain and not plain:
                kind = "failed"
            if job.has_payload:
                self.adopt(job)
            if kind:
                self.settle(request_id, kind)
            else:
                expected.append(request_id)
                self.order.remove(request_id)
        assert [job.request_id for job in claimed] == expected
        for each in claimed:
            job = self.jobs[each.request_id]
            job.state, job.owner = LEASED, each.token
            job.stream.append("started")
            self.owners.append(Owner(each))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), kind=st.sampled_from(["delta", "delta", "finished", "failed"]), repeat=st.booleans())
    def write(self, data: st.DataObject, kind: str, repeat: bool) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        again = repeat and owner.last is not None
        entry = owner.last if again else owner.next(kind)
        request_id = owner.job.request_id
        job = self.jobs[request_id]
        send = self.wire.worker.finish if entry.type in TERMINAL else self.publish_one
        stands = again and self.run(self.stands(entry))
        outcome = self.run(send(entry))
        if stands:
            assert outcome == "ok"
        elif job.state == LEASED and job.owner == owner.job.token:
            assert outcome == "ok" and not again
            owner.written, owner.last = owner.written + 1, entry
            if entry.type in TERMINAL:
                self.settle(request_id, entry.type)
            else:
                job.stream.append(entry.type)
        else:
            assert outcome == "fenced"

    async def publish_one(self, entry: Entry) -> Any:
        (outcome,) = await self.wire.publish(entry)
        return outcome

    async def stands(self, entry: Entry) -> bool:
        return entry.entry_id in dict(await self.wire.entries(entry.request_id))

    @rule()
    def renew(self) -> None:
        pairs = [(owner.job.request_id, owner.job.token) for owner in self.owners]
        holding = [pair for pair in pairs if self.jobs[pair[0]].owner == pair[1]]
        cancelled = [request_id for request_id, _ in holding if self.jobs[request_id].cancelled]
        lost = [pair[0] for pair in pairs if pair not in holding]
        assert self.run(self.wire.worker.renew(pairs, lease_ms=60_000)) == Renewed(cancelled, lost)

    @rule(only=st.none() | request_ids)
    def expire(self, only: str | None) -> None:
        ended = self.run(self.wire.producer.expire(request_id=only))
        expected = []
        for request_id in [only] if only else IDS:
            job = self.jobs[request_id]
            if job.state in (WAITING, LAPSED) and (job.overdue or job.cancelled):
                expected.append(request_id)
                self.settle(request_id, "finished")
        assert sorted(ended) == sorted(expected)

    # What happens to them.

    @rule(request_id=request_ids)
    def lease_ends(self, request_id: str) -> None:
        job = self.jobs[request_id]
        if job.state == LEASED:
            self.run(self.wire.lapse(request_id))
            job.state, job.owner = LAPSED, None

    @rule(request_id=request_ids)
    def deadline_passes(self, request_id: str) -> None:
        job = self.jobs[request_id]
        if job.lives and job.has_deadline:
            self.run(self.wire.pass_deadline(request_id))
            job.overdue = True

    @rule(request_id=request_ids)
    def payload_is_lost(self, request_id: str) -> None:
        job = self.jobs[request_id]
        if job.lives and not job.plain:
            self.run(self.wire.redis.delete(self.wire.keys.payload(request_id)))
            job.has_payload = False

    @rule()
    def server_forgets_scripts(self) -> None:
        self.run(self.wire.redis.script_flush())

    # How the model changes.

    def ending(self, request_id: str) -> str | None:
        job = self.jobs[request_id]
        if job.cancelled or job.overdue:
            return "finished"
        return None if job.has_payload else "failed"

    def adopt(self, job: Job) -> None:
        if job.plain:
            job.plain, job.stream = False, ["queued"]

    def settle(self, request_id: str, kind: str) -> None:
        self.jobs[request_id].end(kind)
        if request_id in self.order:
            self.order.remove(request_id)

    # What must hold after each step.

    @invariant()
    def the_database_is_as_the_model_says(self) -> None:
        self.run(self.compare())

    async def compare(self) -> None:
        keys, server = self.wire.keys, self.wire.redis
        assert [each.decode() for each in await server.zrange(keys.queue, 0, -1)] == self.order
        for request_id, job in self.jobs.items():
            assert await self.wire.job_keys(request_id) == self.expected_keys(job), request_id
            types = await self.wire.types(request_id)
            assert types == job.stream
            assert sum(kind in TERMINAL for kind in types) == (job.state == ENDED or (job.plain and bool(types)))
            assert not any(kind in TERMINAL for kind in types[:-1])
            await self.check_ids(request_id)
        for key in await server.keys("*"):
            lifetime = await server.pttl(key)
            assert (lifetime == -1) == (key.decode() in (keys.queue, keys.running, keys.deadlines)), key

    def expected_keys(self, job: Job) -> set[str]:
        if not job.lives:
            return set()
        expected = {"queue"} if job.state == WAITING else {"running"}
        present = {
            "job": not job.plain,
            "payload": job.has_payload,
            "lease": job.state == LEASED,
            "cancel": job.cancelled,
            "deadlines": job.has_deadline,
        }
        return expected | {name for name, there in present.items() if there}

    async def check_ids(self, request_id: str) -> None:
        """Ids rise strictly, and the last of an id's stream never falls, whatever jobs followed each other."""
        ids = [tuple(map(int, entry_id.split("-"))) for entry_id, _ in await self.wire.entries(request_id)]
        assert ids == sorted(set(ids))
        if ids:
            assert self.tops.get(request_id, (0, 0)) <= ids[-1]
            self.tops[request_id] = ids[-1]


def explore(url: str, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        lambda: Protocol(url),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_sequence_of_commands_keeps_the_protocol(redis_url: str) -> None:
    explore(redis_url, examples=30, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(16))
def test_any_sequence_of_commands_keeps_the_protocol_at_full_size(redis_url: str, part: int) -> None:
    """In parts, so that a small run takes some of them. Each part draws its own examples."""
    explore(redis_url, examples=25, steps=60)
