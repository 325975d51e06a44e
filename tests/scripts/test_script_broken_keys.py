"""Anybody may write to Redis: whatever stands under the keys of one job, that job ends alone and the queue goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import redis.asyncio
from redis.exceptions import ResponseError
from support.wire import Wire, following

from inferq.producer.contract import Keys
from inferq.producer.errors import InvalidRequest
from inferq.producer.events import ErrorCode, Failed
from inferq.worker.commands import Renewed

MAX_ID = "18446744073709551615-18446744073709551615"

Breaker = Callable[[Wire], Awaitable[object]]


def _string(key: Callable[[Keys, str], str]) -> Breaker:
    return lambda wire: wire.redis.set(key(wire.keys, "bad"), "x", ex=60)


def _list(key: Callable[[Keys, str], str]) -> Breaker:
    async def breaker(wire: Wire) -> None:
        name = key(wire.keys, "bad")
        await wire.redis.delete(name)
        await wire.redis.rpush(name, "x")
        await wire.redis.expire(name, 60)

    return breaker


def _field(name: str, value: str | None) -> Breaker:
    def breaker(wire: Wire) -> Awaitable[object]:
        key = wire.keys.job("bad")
        return wire.redis.hdel(key, name) if value is None else wire.redis.hset(key, name, value)

    return breaker


def _entry(entry_id: str, *, deleted: bool = False) -> Breaker:
    async def breaker(wire: Wire) -> None:
        await wire.redis.xadd(wire.keys.events("bad"), {"t": "x", "d": "y"}, id=entry_id)
        await wire.redis.expire(wire.keys.events("bad"), 60)
        if deleted:
            await wire.redis.xdel(wire.keys.events("bad"), entry_id)

    return breaker


#: What somebody may have done to the keys of a job that waits.
WAITING: dict[str, Breaker] = {
    "job-a-string": _string(Keys.job),
    "job-a-list": _list(Keys.job),
    "events-a-string": _string(Keys.events),
    "payload-a-list": _list(lambda keys, name: keys.payload(name)),
    "cancel-a-list": _list(Keys.cancel),
    "lease-a-list": _list(lambda keys, name: keys.lease(name)),
    "no-model": _field("model", None),
    "generation-a-word": _field("generation", "abc"),
    "generation-empty": _field("generation", ""),
    "attempts-a-word": _field("attempts", "abc"),
    "attempts-endless": _field("attempts", "9" * 400),
    "attempts-gone": _field("attempts", None),
    "enqueued-at-nan": _field("enqueued_at_ms", "nan"),
    "enqueued-at-negative": _field("enqueued_at_ms", "-1"),
    "expires-at-infinite": _field("expires_at_ms", "inf"),
    "order-a-word": _field("order", "abc"),
    "order-past-every-clock": _field("order", "1e300"),
    "priority-infinite": _field("priority", "inf"),
    "estimate-nan": _field("estimate", "nan"),
    "choices-a-word": _field("choices", "abc"),
    "losses-endless": _field("losses", "9" * 400),
    "losses-negative": _field("losses", "-1"),
    "queue-ms-a-word": _field("queue_ms", "abc"),
    "queue-ms-infinite": _field("queue_ms", "inf"),
    "last-id-the-largest": _entry(MAX_ID),
    "last-id-past-all-counting": _entry(f"{2**63}-0"),
    "last-id-deleted": _entry(f"{2**63}-0", deleted=True),
}

#: And of one that a worker runs.
RUNNING = {
    name: WAITING[name]
    for name in ("job-a-string", "events-a-string", "cancel-a-list", "lease-a-list", "last-id-deleted")
}


async def ended_as_broken(wire: Wire, request_id: str = "bad") -> None:
    assert await wire.job_keys(request_id) == set()
    failed = (await wire.events(request_id))[-1]
    assert isinstance(failed, Failed) and failed.code is ErrorCode.INTERNAL and "broken" in failed.message
    assert await wire.redis.pttl(wire.keys.events(request_id)) > 0


@pytest.mark.parametrize("broken", WAITING.values(), ids=WAITING)
class TestAWaitingJob:
    async def test_ends_alone_in_a_claim(self, wire: Wire, broken: Breaker) -> None:
        for request_id in ("before", "bad", "after"):
            await wire.enqueue(request_id)
        await broken(wire)

        jobs = await wire.claim(slots=5)

        assert [job.request_id for job in jobs] == ["before", "after"]
        assert await wire.publish(*(following(job) for job in jobs)) == ["ok", "ok"]
        await ended_as_broken(wire)
        await wire.enqueue("bad")
        assert [job.request_id for job in await wire.claim()] == ["bad"]

    async def test_ends_or_stays_when_it_is_cancelled(self, wire: Wire, broken: Breaker) -> None:
        await wire.enqueue("bad")
        await broken(wire)
        assert await wire.producer.cancel("bad") == "cancelled"
        assert await wire.job_keys("bad") == set()
        assert (await wire.types("bad"))[-1] in ("finished", "failed")

    async def test_does_not_hold_up_what_expires(self, wire: Wire, broken: Breaker) -> None:
        for request_id in ("before", "bad", "after"):
            await wire.enqueue(request_id, deadline_ms=60_000)
            await wire.pass_deadline(request_id)
        await broken(wire)
        assert {"before", "after"} <= set(await wire.producer.expire())
        for request_id in ("before", "after"):
            assert await wire.types(request_id) == ["queued", "finished"]
        await wire.claim()
        assert await wire.job_keys("bad") == set()


@pytest.mark.parametrize("broken", RUNNING.values(), ids=RUNNING)
class TestARunningJob:
    async def test_does_not_hold_up_its_neighbours(self, wire: Wire, broken: Breaker) -> None:
        for request_id in ("before", "bad", "after"):
            await wire.enqueue(request_id)
        jobs = await wire.claim(slots=3)
        await broken(wire)

        outcomes = await wire.publish(*(following(job) for job in jobs))
        assert (outcomes[0], outcomes[2]) == ("ok", "ok")
        renewed = await wire.worker.renew([(job.request_id, job.token) for job in jobs], lease_ms=60_000)
        assert renewed == Renewed([], ["bad"])
        await ended_as_broken(wire)
        assert await wire.worker.finish(following(jobs[1], 2, kind="finished")) == "fenced"
        for job in (jobs[0], jobs[2]):
            assert await wire.worker.finish(following(job, 2, kind="finished")) == "ok"
            assert await wire.types(job.request_id) == ["queued", "started", "delta", "finished"]

    async def test_ends_as_broken_where_its_owner_would_end_it(self, wire: Wire, broken: Breaker) -> None:
        await wire.enqueue("bad")
        (job,) = await wire.claim()
        await broken(wire)
        outcome = await wire.worker.finish(following(job, kind="finished"))
        assert await wire.job_keys("bad") == set()
        if outcome == "ok":
            assert await wire.types("bad") == ["queued", "started", "finished"]
        else:
            await ended_as_broken(wire)

    async def test_does_not_hold_up_a_takeover(self, wire: Wire, broken: Breaker) -> None:
        for request_id in ("before", "bad", "after"):
            await wire.enqueue(request_id)
        await wire.claim(slots=3)
        for request_id in ("before", "bad", "after"):
            await wire.lapse(request_id)
        await broken(wire)
        jobs = await wire.claim(slots=3)
        assert {(job.request_id, job.attempt) for job in jobs} == {("before", 2), ("after", 2)}
        assert await wire.publish(*(following(job) for job in jobs)) == ["ok", "ok"]
        await ended_as_broken(wire)

    async def test_does_not_hold_up_the_next_call_of_a_worker_that_missed_a_reply(
        self, wire: Wire, broken: Breaker
    ) -> None:
        for request_id in ("before", "bad", "after"):
            await wire.enqueue(request_id)
        await wire.claim(slots=3, token="lost")
        await broken(wire)
        jobs = await wire.claim(slots=3, lost_tokens=["lost"])
        assert {(job.request_id, job.attempt) for job in jobs} >= {("before", 1), ("after", 1)}
        assert await wire.publish(*(following(job) for job in jobs if job.request_id != "bad")) == ["ok", "ok"]
        await wire.lapse("bad")
        await wire.claim()
        await ended_as_broken(wire)

    async def test_is_not_kept_by_an_owner_who_wants_it_back(self, wire: Wire, broken: Breaker) -> None:
        job = await wire.claimed("bad")
        await wire.lapse("bad")
        await broken(wire)
        await wire.reacquire(job)
        await wire.worker.renew([("bad", job.token)], lease_ms=60_000)
        await ended_as_broken(wire)

    async def test_is_not_handed_back(self, wire: Wire, broken: Breaker) -> None:
        job = await wire.claimed("bad")
        await broken(wire)
        await wire.hand_back(job)
        await wire.claim()
        assert await wire.job_keys("bad") == set()

    async def test_may_have_a_reader(self, wire: Wire, broken: Breaker) -> None:
        await wire.claimed("bad", cancel_on_disconnect=True)
        await broken(wire)
        await wire.producer.touch_reader("bad")


async def test_a_lease_without_an_end_is_none(wire: Wire) -> None:
    """A key that somebody set by hand would keep the job from everybody for ever."""
    await wire.enqueue("bad")
    await wire.redis.set(wire.keys.lease("bad"), "x")
    assert [job.request_id for job in await wire.claim()] == ["bad"]
    await wire.redis.persist(wire.keys.lease("bad"))
    await wire.redis.zadd(wire.keys.running, {"bad": 1})
    assert [(job.request_id, job.attempt) for job in await wire.claim()] == [("bad", 2)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("charge", "abc"), ("charge", "nan"), ("choices", "1e300"), ("queue_ms", "0x10"), ("estimate", "1e300")],
)
async def test_a_field_that_only_some_scripts_use_is_no_hindrance(wire: Wire, field: str, value: str) -> None:
    await wire.enqueue("odd")
    await wire.redis.hset(wire.keys.job("odd"), field, value)
    (job,) = await wire.claim()
    assert job.request_id == "odd"
    await wire.hand_back(job)
    assert await wire.producer.cancel("odd") == "cancelled"
    assert await wire.job_keys("odd") == set()


@pytest.mark.parametrize("request_id", [b"\xff", b"a b", b"x" * 65])
async def test_an_id_that_is_none_is_refused_whatever_job_it_has(wire: Wire, request_id: bytes) -> None:
    job = {"model": "tiny", "generation": 1, "attempts": 0, "enqueued_at_ms": 1, "expires_at_ms": 1}
    keys = [b"inferq:" + request_id + b":job", b"arq:job:" + request_id, b"inferq:" + request_id + b":events"]
    for past_its_deadline in (False, True):
        await wire.redis.hset(keys[0], mapping=job if past_its_deadline else {**job, "expires_at_ms": 2**52})
        await wire.redis.set(keys[1], "{}", ex=60)
        await wire.redis.zadd(wire.keys.queue, {request_id: 1})
        await wire.redis.zadd(wire.keys.deadlines, {request_id: 1})
        if past_its_deadline:
            assert len(await wire.producer.expire()) == 1
        else:
            assert await wire.claim() == []
        entries = await wire.redis.xrange(keys[2])
        assert entries[-1][1][b"t"] == (b"finished" if past_its_deadline else b"failed")
        assert await wire.redis.exists(*keys[:2]) == 0
        await wire.redis.delete(keys[2])


@pytest.mark.parametrize("broken", ["events-a-string", "job-a-string", "last-id-the-largest"])
async def test_nothing_is_enqueued_onto_what_is_no_job_of_ours(wire: Wire, broken: str) -> None:
    await WAITING[broken](wire)
    before = sorted(await wire.redis.keys("*"))
    with pytest.raises(InvalidRequest, match="request_id"):
        await wire.enqueue("bad")
    assert sorted(await wire.redis.keys("*")) == before


@pytest.mark.parametrize("generation", ["abc", "", "9" * 400])
async def test_a_broken_job_is_not_the_answer_to_an_idempotent_repeat(wire: Wire, generation: str) -> None:
    await wire.enqueue("bad", fingerprint="f1", idempotent=True)
    await wire.redis.hset(wire.keys.job("bad"), "generation", generation)
    with pytest.raises(InvalidRequest, match="request_id"):
        await wire.enqueue("bad", fingerprint="f1", idempotent=True)


async def test_a_broken_head_does_not_break_the_answer_of_a_full_backlog(wire: Wire) -> None:
    await wire.enqueue("bad")
    for broken in ("enqueued-at-nan", "job-a-string"):
        await WAITING[broken](wire)
        with pytest.raises(Exception, match="1 jobs are waiting"):
            await wire.enqueue("late", max_backlog=1)


async def test_what_the_server_refuses_to_everybody_is_no_jobs_fault(wire: Wire, redis_url: str) -> None:
    """A user who may not write streams: the call fails, and no job is taken for broken."""
    await wire.enqueue("a")
    permissions = {"commands": ["+@all", "-xadd"], "keys": ["*"], "channels": ["*"]}
    await wire.redis.acl_setuser("limited", enabled=True, reset=True, passwords=["+limited"], **permissions)
    try:
        async with redis.asyncio.Redis.from_url(redis_url, username="limited", password="limited") as limited:
            with pytest.raises(ResponseError):
                await Wire(limited).claim()
    finally:
        await wire.redis.acl_deluser("limited")
    assert {"job", "payload"} <= await wire.job_keys("a")
    assert await wire.types("a") == ["queued"]
