"""Enqueue: an accepted job has its payload, its `:job`, its place, its stream; a refused one leaves no trace."""

from __future__ import annotations

import asyncio

import pytest
from support.wire import Wire, following

from inferq.producer.contract import JOB_TTL_MS
from inferq.producer.errors import DuplicateRequest, IdempotencyConflict, QueueFull
from inferq.producer.events import Queued

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_an_accepted_job_stands_everywhere_where_scripts_look_for_it(wire: Wire) -> None:
    enqueued = await wire.enqueue(
        "a", b'{"p":1}', priority=3, tenant="acme", trace=TRACE, fingerprint="f00d", estimate=7000, deadline_ms=60_000
    )

    assert enqueued.position == 0
    assert enqueued.entry_id == f"{enqueued.generation}-0"
    assert await wire.job_keys("a") == {"job", "payload", "queue", "deadlines"}
    assert await wire.redis.get(wire.keys.payload("a")) == b'{"p":1}'
    job = {key.decode(): value.decode() for key, value in (await wire.redis.hgetall(wire.keys.job("a"))).items()}
    order = await wire.redis.zscore(wire.keys.queue, "a")
    assert float(job.pop("order")) == order
    assert len(job.pop("submission")) == 32
    assert order == 7 - 3 * 10_000
    enqueued_at_ms = int(job["enqueued_at_ms"])
    assert abs(enqueued_at_ms - await wire.now_ms()) < 60_000
    assert job == {
        "model": "tiny",
        "generation": str(enqueued.generation),
        "enqueued_at_ms": str(enqueued_at_ms),
        "expires_at_ms": str(enqueued_at_ms + 60_000),
        "attempts": "0",
        "charge": "7.000000",
        "choices": "1",
        "priority": "3",
        "tenant": "acme",
        "estimate": "7000",
        "fingerprint": "f00d",
    }
    assert await wire.redis.zscore(wire.keys.deadlines, "a") == enqueued_at_ms + 60_000
    assert await wire.events("a") == [
        Queued(v=1, generation=enqueued.generation, enqueued_at_ms=enqueued_at_ms, trace=TRACE)
    ]


async def test_the_stream_has_its_lifetime_with_its_first_entry(wire: Wire) -> None:
    await wire.enqueue("a")
    for key in (wire.keys.events("a"), wire.keys.job("a"), wire.keys.payload("a")):
        assert JOB_TTL_MS - 10_000 < await wire.redis.pttl(key) <= JOB_TTL_MS


async def test_jobs_wait_in_the_order_of_their_arrival(wire: Wire) -> None:
    ids = [f"job-{number}" for number in range(30)]
    assert [(await wire.enqueue(request_id)).position for request_id in ids] == list(range(30))
    assert [each.decode() for each in await wire.redis.zrange(wire.keys.queue, 0, -1)] == ids


async def test_a_job_of_a_living_id_is_a_duplicate(wire: Wire) -> None:
    await wire.enqueue("a", b"1")
    with pytest.raises(DuplicateRequest):
        await wire.enqueue("a", b"2")
    await wire.claim()
    with pytest.raises(DuplicateRequest):
        await wire.enqueue("a", b"3")
    assert await wire.redis.get(wire.keys.payload("a")) == b"1"
    assert await wire.types("a") == ["queued", "started"]


async def test_a_plain_arq_job_makes_its_id_a_duplicate(wire: Wire) -> None:
    await wire.enqueue_plain("a", b"1")
    with pytest.raises(DuplicateRequest):
        await wire.enqueue("a", b"2")
    assert await wire.redis.get(wire.keys.payload("a")) == b"1"


async def test_an_id_whose_owner_still_holds_a_lease_is_a_duplicate(wire: Wire) -> None:
    """An evicting server has taken all but the lease: its owner is still at work under that id."""
    job = await wire.claimed("a")
    await wire.redis.delete(wire.keys.job("a"), wire.keys.payload("a"))
    with pytest.raises(DuplicateRequest):
        await wire.enqueue("a")
    assert await wire.publish(following(job)) == ["ok"]


async def test_of_many_submits_at_once_one_is_accepted(wire: Wire) -> None:
    outcomes = await asyncio.gather(*(wire.enqueue("a") for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(outcome, DuplicateRequest) for outcome in outcomes) == 19
    assert await wire.redis.zcard(wire.keys.queue) == 1


async def test_a_submit_that_the_connection_sends_twice_is_accepted_once(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reply was lost; the second call finds the job, and knows it for its own."""
    scripts = wire.producer._scripts
    run = scripts.run

    async def run_twice(name: str, *args: str | bytes | int) -> object:
        await run(name, *args)
        return await run(name, *args)

    monkeypatch.setattr(scripts, "run", run_twice)
    enqueued = await wire.enqueue("a")

    assert await wire.types("a") == ["queued"]
    assert enqueued.entry_id == (await wire.entries("a"))[0][0]
    assert enqueued.position == 0
    assert await wire.redis.zcard(wire.keys.queue) == 1


async def test_a_submit_that_is_sent_again_after_the_jobs_end_runs_nothing_twice(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reply was lost, and the job was short: its stream still says whose submission it was."""
    scripts = wire.producer._scripts
    run = scripts.run

    async def run_end_and_run(name: str, *args: str | bytes | int) -> object:
        await run(name, *args)
        (job,) = await wire.claim()
        await wire.worker.finish(following(job, kind="finished"))
        return await run(name, *args)

    monkeypatch.setattr(scripts, "run", run_end_and_run)
    enqueued = await wire.enqueue("a")
    monkeypatch.undo()

    assert await wire.types("a") == ["queued", "started", "finished"]
    assert enqueued.entry_id == f"{enqueued.generation}-0" == (await wire.entries("a"))[0][0]
    assert await wire.job_keys("a") == set()
    assert (await wire.enqueue("a")).generation > enqueued.generation


async def test_an_id_can_be_used_again_when_its_job_has_ended(wire: Wire) -> None:
    job = await wire.claimed("a")
    assert await wire.worker.finish(following(job, kind="finished")) == "ok"
    last_epoch = int((await wire.entries("a"))[-1][0].split("-")[0])

    again = await wire.enqueue("a")

    assert await wire.types("a") == ["queued"]
    assert again.generation > last_epoch
    assert JOB_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.events("a"))


async def test_a_new_epoch_is_above_the_old_ones_when_the_clock_has_gone_back(wire: Wire) -> None:
    """After a failover to a server whose clock is an hour behind, the stream already has epochs of the future."""
    future = 4_000_000_000_000_000
    await wire.redis.xadd(wire.keys.events("a"), {"t": "failed", "d": "{}"}, id=f"{future}-3")
    assert (await wire.enqueue("a")).generation == future + 1
    (job,) = await wire.claim()
    assert job.epoch == future + 2
    assert await wire.types("a") == ["queued", "started"]


async def test_at_its_bound_the_backlog_refuses_and_says_when_to_come_again(wire: Wire) -> None:
    for number in range(3):
        await wire.enqueue(f"job-{number}", max_backlog=3)
    await wire.redis.hset(wire.keys.job("job-0"), "enqueued_at_ms", int((await wire.redis.time())[0]) * 1000 - 30_000)

    with pytest.raises(QueueFull, match="3 jobs are waiting") as refused:
        await wire.enqueue("late", max_backlog=3)

    # Three jobs, of which the first has waited 30 s: one leaves about every 10 s.
    assert 10 <= refused.value.retry_after_seconds <= 12
    assert await wire.job_keys("late") == set()
    assert await wire.entries("late") == []
    await wire.claim()
    assert (await wire.enqueue("late", max_backlog=3)).position == 2


async def test_the_time_to_come_again_is_bounded(wire: Wire) -> None:
    await wire.enqueue("a", max_backlog=1)
    with pytest.raises(QueueFull) as soon:
        await wire.enqueue("b", max_backlog=1)
    await wire.redis.hset(wire.keys.job("a"), "enqueued_at_ms", 0)
    with pytest.raises(QueueFull) as late:
        await wire.enqueue("b", max_backlog=1)
    assert (soon.value.retry_after_seconds, late.value.retry_after_seconds) == (1.0, 60.0)


async def test_the_bell_rings_once_a_job_and_never_without_bound(wire: Wire) -> None:
    await wire.enqueue("a")
    assert await wire.redis.llen(wire.keys.bell) == 1
    assert 0 < await wire.redis.ttl(wire.keys.bell) <= 60
    for number in range(100):
        await wire.enqueue(f"job-{number}")
    assert await wire.redis.llen(wire.keys.bell) == 64


async def test_nothing_of_an_older_job_of_the_id_is_left(wire: Wire) -> None:
    """Its keys ran out while no worker was there; its places in the sets have no lifetime."""
    await wire.enqueue("a", deadline_ms=5)
    await wire.redis.delete(wire.keys.job("a"), wire.keys.payload("a"), wire.keys.events("a"))
    await wire.redis.zadd(wire.keys.running, {"a": 1})
    await wire.redis.set(wire.keys.cancel("a"), "1", ex=60)

    await wire.enqueue("a")

    assert await wire.job_keys("a") == {"job", "payload", "queue"}
    assert [job.request_id for job in await wire.claim()] == ["a"]


class TestIdempotency:
    async def test_a_repeat_finds_the_job_that_is_there(self, wire: Wire) -> None:
        first = await wire.enqueue("a", b"1", fingerprint="f1", idempotent=True)
        assert first.created
        await wire.enqueue("b")
        before = await wire.everything()
        again = await wire.enqueue("a", b"1", fingerprint="f1", idempotent=True)
        assert (again.created, again.generation, again.entry_id) == (False, first.generation, first.entry_id)
        assert again.position == 0
        assert await wire.everything() == before

    async def test_it_finds_it_while_it_runs_and_after_its_end(self, wire: Wire) -> None:
        job = await wire.claimed("a", fingerprint="f1", idempotent=True)
        for _ in range(2):
            before = await wire.everything()
            again = await wire.enqueue("a", fingerprint="f1", idempotent=True)
            assert (again.created, again.generation) == (False, job.generation)
            assert await wire.everything() == before
            await wire.worker.finish(following(job, kind="finished"))

    async def test_it_finds_it_also_at_the_bound_of_the_backlog_and_twice(self, wire: Wire) -> None:
        await wire.enqueue("a", fingerprint="f1", idempotent=True, max_backlog=1)
        for _ in range(2):
            assert not (await wire.enqueue("a", fingerprint="f1", idempotent=True, max_backlog=1)).created

    async def test_another_request_is_a_conflict_as_long_as_the_first_is_known(self, wire: Wire) -> None:
        job = await wire.claimed("a", fingerprint="f1", idempotent=True)
        for _ in range(2):
            before = await wire.everything()
            with pytest.raises(IdempotencyConflict):
                await wire.enqueue("a", fingerprint="f2", idempotent=True)
            assert await wire.everything() == before
            await wire.worker.finish(following(job, kind="finished"))

    async def test_when_the_stream_has_expired_the_key_begins_anew(self, wire: Wire) -> None:
        job = await wire.claimed("a", fingerprint="f1", idempotent=True)
        await wire.worker.finish(following(job, kind="finished"))
        await wire.redis.delete(wire.keys.events("a"))
        assert (await wire.enqueue("a", fingerprint="f2", idempotent=True)).created

    async def test_what_the_first_request_was_is_known_from_itself_alone(self, wire: Wire) -> None:
        """Of a stream that says nothing of it nobody can tell: better no answer than another request's."""
        job = await wire.claimed("a", fingerprint="f1")
        await wire.worker.finish(following(job, kind="finished"))
        with pytest.raises(IdempotencyConflict):
            await wire.enqueue("a", fingerprint="f1", idempotent=True)

    async def test_of_many_at_once_one_is_created(self, wire: Wire) -> None:
        submissions = (wire.enqueue("a", fingerprint="f1", idempotent=True) for _ in range(20))
        accepted = await asyncio.gather(*submissions)
        assert sum(each.created for each in accepted) == 1
        assert len({each.entry_id for each in accepted}) == 1
        assert await wire.types("a") == ["queued"]

    async def test_a_plain_arq_job_of_that_id_is_a_duplicate(self, wire: Wire) -> None:
        await wire.enqueue_plain("a")
        with pytest.raises(DuplicateRequest):
            await wire.enqueue("a", fingerprint="f1", idempotent=True)
