"""Any sequence of commands, by producers, several owners and accidents, against a small model of what must hold.

The scripts and the server are real. The model knows of each id its state, what its stream holds and who owns it;
every answer is predicted, and after each step the whole database is compared with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.job_model import ENDED, LAPSED, LEASED, MAX_ATTEMPTS, WAITING, Job, Owner, QueueModel
from support.wire import Wire, after

from inferq.producer.errors import DuplicateRequest, QueueFull
from inferq.producer.events import decode_event
from inferq.worker.commands import DeadLetter, Entry, Renewed

T = TypeVar("T")
IDS = ("a", "b", "c", "d")
MAX_BACKLOG = 3
TERMINAL = ("finished", "failed")

request_ids = st.sampled_from(IDS)


class Protocol(RuleBasedStateMachine):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.wire = Wire(redis.asyncio.Redis.from_url(url))
        self.run(self.wire.redis.flushdb())
        self.model = QueueModel(IDS)
        self.owners: list[Owner] = []
        self.lost_tokens: list[str] = []
        self.tops: dict[str, tuple[int, int]] = {}

    def run(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return self.runner.run(awaited())

    def teardown(self) -> None:
        self.run(self.wire.redis.aclose())
        self.runner.close()

    # What producers do.

    @rule(request_id=request_ids, deadline=st.booleans(), watched=st.booleans())
    def enqueue(self, request_id: str, deadline: bool, watched: bool) -> None:
        job = self.model.jobs[request_id]
        options = {"deadline_ms": 3_600_000 if deadline else None, "max_backlog": MAX_BACKLOG}
        options |= {"cancel_on_disconnect": watched}
        if job.lives:
            with pytest.raises(DuplicateRequest):
                self.run(self.wire.enqueue(request_id, **options))
        elif len(self.model.order()) >= MAX_BACKLOG:
            with pytest.raises(QueueFull):
                self.run(self.wire.enqueue(request_id, **options))
        else:
            place = self.model.places.next()
            accepted = self.run(self.wire.enqueue(request_id, **options))
            self.model.jobs[request_id] = Job(WAITING, ["queued"], place, has_deadline=deadline, watched=watched)
            assert accepted.position == self.model.order().index(request_id)

    @rule(request_id=request_ids)
    def enqueue_plain(self, request_id: str) -> None:
        if self.model.jobs[request_id].lives:
            return  # arq's client looks for the payload, as ours does
        self.run(self.wire.enqueue_plain(request_id))
        self.model.unplaced.append(request_id)
        self.model.jobs[request_id] = Job(WAITING, self.model.jobs[request_id].stream, plain=True)

    @rule(request_id=request_ids)
    def cancel(self, request_id: str) -> None:
        job = self.model.jobs[request_id]
        outcome = self.run(self.wire.producer.cancel(request_id))
        if job.state == LEASED:
            assert outcome == "requested"
            job.cancel_key = True
        elif job.lives:
            assert outcome == "cancelled"
            job.adopt()
            self.model.settle(request_id, "finished")
        else:
            assert outcome == ("finished" if job.state == ENDED else "unknown")

    @rule(request_id=request_ids)
    def touch_reader(self, request_id: str) -> None:
        job = self.model.jobs[request_id]
        assert self.run(self.wire.producer.touch_reader(request_id)) is job.watched
        if job.watched:
            job.armed = job.has_reader = True

    # What workers do.

    @rule(
        slots=st.integers(0, 4),
        takeover=st.booleans(),
        grace=st.booleans(),
        plain=st.booleans(),
        exclude=st.sets(request_ids, max_size=2),
        is_answered=st.integers(0, 3).map(bool),
    )
    def claim(self, slots: int, takeover: bool, grace: bool, plain: bool, exclude: set[str], is_answered: bool) -> None:
        """Now and then a reply is lost: the worker names that call's token in all calls until one is answered."""
        rules = {"takeover": takeover, "grace_end_ms": 2 if grace else 0, "max_attempts": MAX_ATTEMPTS}
        rules |= {"lost_tokens": self.lost_tokens}
        claimed = self.run(self.wire.claim(slots, accept_plain=plain, exclude=exclude, **rules))
        found = [job.request_id for job in claimed]
        taken_back = self.model.take_back(self.lost_tokens, exclude)
        assert sorted(found[: len(taken_back)]) == taken_back
        expected = self.model.take_lapsed(slots - len(taken_back), grace, exclude) if takeover else []
        self.model.place_plain(plain)
        expected += self.model.take_waiting(slots - len(taken_back) - len(expected), exclude)
        assert found[len(taken_back) :] == expected
        for each in claimed:
            self.model.check_claimed(each)
        if is_answered:
            self.owners += [Owner(each) for each in claimed]
            self.lost_tokens = []
        else:
            self.lost_tokens += [each.token for each in claimed[:1]]

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), kind=st.sampled_from(["delta", "delta", "finished", "failed"]), repeat=st.booleans())
    def write(self, data: st.DataObject, kind: str, repeat: bool) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        again = repeat and owner.last is not None
        entry = owner.last if again else owner.next(kind)
        job = self.model.jobs[entry.request_id]
        stands = again and self.run(self.stands(entry))
        outcome = self.run(self.send(entry))
        if stands:
            assert outcome == "ok"
        elif self.model.holds(owner):
            assert outcome == "ok" and not again
            owner.written, owner.last = owner.written + 1, entry
            if entry.type == "delta":
                job.stream.append("delta")
                job.tokens += 1
            else:
                self.model.settle(entry.request_id, entry.type, dies=entry.type == "failed")
        else:
            assert outcome == "fenced"

    async def send(self, entry: Entry) -> Any:
        """A job that fails does so as a dead letter."""
        if entry.type in TERMINAL:
            dead = DeadLetter("engine_crashed", 1) if entry.type == "failed" else None
            return await self.wire.worker.finish(entry, dead=dead)
        (outcome,) = await self.wire.publish(entry)
        return outcome

    async def stands(self, entry: Entry) -> bool:
        return entry.entry_id in dict(await self.wire.entries(entry.request_id))

    @rule()
    def renew(self) -> None:
        pairs = [(owner.job.request_id, owner.job.token) for owner in self.owners]
        holding = [(owner.job.request_id, owner.job.token) for owner in self.owners if self.model.holds(owner)]
        cancelled = [request_id for request_id, _ in holding if self.model.jobs[request_id].cancelled]
        lost = [pair[0] for pair in pairs if pair not in holding]
        assert self.run(self.wire.worker.renew(pairs, lease_ms=60_000)) == Renewed(cancelled, lost)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def reacquire(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        request_id = owner.job.request_id
        job = self.model.jobs[request_id]
        newest = self.tops.get(request_id, (0, 0))[0]
        free = job.state in (WAITING, LAPSED) and not job.plain and newest <= owner.job.epoch
        got = self.run(self.wire.reacquire(owner.job))
        assert (got is not None) is (self.model.holds(owner) or free)
        if got is not None:
            assert got.resumed_tokens == (job.tokens,) and got.epoch > newest
            owner.job, owner.written = after(owner.job, got), 0
            job.state, job.owner, job.handed_back_by = LEASED, owner.job.token, None
            job.stream.append("started")

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        job = self.model.jobs[owner.job.request_id]
        outcome = self.run(self.wire.hand_back(owner.job, owner.written))
        if not self.model.holds(owner):
            given_back = job.lives and job.handed_back_by == owner.job.token
            assert outcome == ("ok" if given_back else "fenced")
            return
        assert outcome == "ok"
        if job.cancelled or job.overdue:
            self.model.settle(owner.job.request_id, "finished")
        else:
            job.state, job.owner, job.handed_back_by = WAITING, None, owner.job.token

    @rule(only=st.none() | request_ids)
    def expire(self, only: str | None) -> None:
        ended = self.run(self.wire.producer.expire(request_id=only))
        expected = []
        for request_id in [only] if only else IDS:
            job = self.model.jobs[request_id]
            if job.state in (WAITING, LAPSED) and (job.overdue or job.cancelled):
                expected.append(request_id)
                self.model.settle(request_id, "finished")
        assert sorted(ended) == sorted(expected)

    # What happens to them.

    @rule(request_id=request_ids)
    def lease_ends(self, request_id: str) -> None:
        job = self.model.jobs[request_id]
        if job.state == LEASED:
            self.run(self.wire.lapse(request_id))
            job.state, job.owner = LAPSED, None

    @rule(request_id=request_ids)
    def deadline_passes(self, request_id: str) -> None:
        job = self.model.jobs[request_id]
        if job.lives and job.has_deadline:
            self.run(self.wire.pass_deadline(request_id))
            job.overdue = True

    @rule(request_id=request_ids)
    def reader_leaves(self, request_id: str) -> None:
        job = self.model.jobs[request_id]
        if job.has_reader:
            self.run(self.wire.reader_leaves(request_id))
            job.has_reader = False

    @rule(request_id=request_ids)
    def payload_is_lost(self, request_id: str) -> None:
        job = self.model.jobs[request_id]
        if job.lives and not job.plain:
            self.run(self.wire.redis.delete(self.wire.keys.payload(request_id)))
            job.has_payload = False

    @rule()
    def server_forgets_scripts(self) -> None:
        self.run(self.wire.redis.script_flush())

    # What must hold after each step.

    @invariant()
    def the_database_is_as_the_model_says(self) -> None:
        self.run(self.compare())

    async def compare(self) -> None:
        keys, server = self.wire.keys, self.wire.redis
        sets = {"queue": keys.queue, "running": keys.running, "deadlines": keys.deadlines}
        async with server.pipeline(transaction=True) as pipe:
            for name in sets.values():
                pipe.zrange(name, 0, -1)
            for request_id in IDS:
                pipe.xrange(keys.events(request_id))
            pipe.xrange(keys.dead)
            pipe.keys("*")
            *answers, names = await pipe.execute()
        members = {name: [each.decode() for each in answers.pop(0)] for name in sets}
        assert members["queue"] == self.model.order()
        for request_id, entries in zip(IDS, answers, strict=False):
            self.check_job(request_id, {name.decode() for name in names}, members)
            self.check_stream(request_id, entries)
        assert [fields[b"id"].decode() for _, fields in answers[-1]] == self.model.dead
        await self.check_lifetimes(names)

    def check_job(self, request_id: str, names: set[str], members: dict[str, list[str]]) -> None:
        keys = self.wire.keys
        parts = {part: getattr(keys, part)(request_id) for part in ("job", "payload", "lease", "cancel", "reader")}
        found = {part for part, key in parts.items() if key in names}
        found |= {name for name, ids in members.items() if request_id in ids}
        assert found == self.model.jobs[request_id].keys(), request_id

    def check_stream(self, request_id: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """One terminal entry at most, and the last. Ids rise strictly, whatever jobs of an id followed each other.

        Tokens follow each other without a gap and without a repeat, whoever wrote them.
        """
        job, events = self.model.jobs[request_id], [decode_event(fields) for _, fields in entries]
        types = [event.type for event in events]
        assert types == job.stream
        assert sum(kind in TERMINAL for kind in types) == (job.state == ENDED or (job.plain and bool(types)))
        assert not any(kind in TERMINAL for kind in types[:-1])
        ids = [tuple(map(int, entry_id.split(b"-"))) for entry_id, _ in entries]
        assert ids == sorted(set(ids))
        if ids:
            assert self.tops.get(request_id, (0, 0)) <= ids[-1]
            self.tops[request_id] = ids[-1]
        indexes = [event.index for event in events if event.type == "delta"]
        assert indexes == list(range(len(indexes)))

    async def check_lifetimes(self, names: list[bytes]) -> None:
        keys = self.wire.keys
        lasting = (keys.queue, keys.running, keys.deadlines, keys.vtime, keys.dead)
        async with self.wire.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.pttl(name)
            for name, lifetime in zip(names, await pipe.execute(), strict=True):
                assert (lifetime == -1) == (name.decode() in lasting), name


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
