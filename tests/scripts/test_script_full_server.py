"""A server at its memory limit: new jobs are refused whole, running ones can still end, and both recover."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.exceptions import OutOfMemoryError
from support.servers import valkey
from support.wire import Wire, following

from inferq.producer.events import Finished, FinishReason
from inferq.worker.commands import DeadLetter, Renewed


@pytest.fixture
async def small() -> AsyncIterator[Wire]:
    with valkey("--maxmemory-policy", "noeviction", "--maxmemory-clients", "0") as url:
        async with redis.asyncio.Redis.from_url(url) as client:
            yield Wire(client)


async def fill(wire: Wire) -> None:
    """From now on every write that may need memory is refused."""
    await wire.redis.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        await wire.redis.set("more", "x", ex=60)


async def make_room(wire: Wire) -> None:
    await wire.redis.config_set("maxmemory", 0)


async def test_enqueue_is_refused_whole_and_works_again_when_there_is_room(small: Wire) -> None:
    job = await small.claimed("old")
    await small.worker.finish(following(job, kind="finished"))
    before = await small.entries("old")
    await fill(small)

    for request_id in ("new", "old"):
        with pytest.raises(OutOfMemoryError):
            await small.enqueue(request_id)
        assert await small.job_keys(request_id) == set()
    assert await small.entries("new") == []
    assert await small.entries("old") == before, "the result of the old job was deleted for nothing"

    await make_room(small)
    assert (await small.enqueue("new")).position == 0


async def test_what_runs_can_finish(small: Wire) -> None:
    job = await small.claimed("a", deadline_ms=60_000)
    await fill(small)
    assert await small.worker.finish(following(job, kind="finished")) == "ok"
    assert await small.types("a") == ["queued", "started", "finished"]
    assert await small.job_keys("a") == set()
    assert await small.redis.pttl(small.keys.events("a")) > 0


async def test_what_runs_can_finish_with_all_that_was_refused(small: Wire) -> None:
    job = await small.claimed("a")
    entries = [following(job, 1), following(job, 2), following(job, 3, kind="finished")]
    await fill(small)
    with pytest.raises(OutOfMemoryError):
        await small.publish(entries[0])
    assert await small.worker.finish(*entries) == "ok"
    assert await small.types("a") == ["queued", "started", "delta", "delta", "finished"]
    assert await small.job_keys("a") == set()
    assert await small.worker.finish(*entries) == "ok"
    assert await small.types("a") == ["queued", "started", "delta", "delta", "finished"]


async def test_a_refused_batch_has_written_nothing(small: Wire) -> None:
    """Also behind a repeat, which needs no memory: what was refused may be put together anew."""
    for request_id in "ab":
        await small.enqueue(request_id)
    a, b = await small.claim(slots=2)
    assert await small.publish(following(a)) == ["ok"]
    await fill(small)
    with pytest.raises(OutOfMemoryError):
        await small.publish(following(a), following(b), following(a, 2))
    assert await small.types("a") == ["queued", "started", "delta"]
    assert await small.types("b") == ["queued", "started"]


async def test_a_worker_shows_itself(small: Wire) -> None:
    keys = small.keys
    await small.worker.beat("w1", '{"card":1}', '{"state":1}', ttl_ms=60_000)
    await fill(small)
    for name in (keys.card, keys.worker("w1")):
        await small.redis.pexpire(name, 1000)
    await small.redis.zrem(keys.workers, "w1")
    await small.worker.beat("w1", '{"card":2}', '{"state":2}', ttl_ms=60_000)
    await small.worker.beat("new", '{"card":2}', '{"state":3}', ttl_ms=60_000)
    assert await small.redis.get(keys.worker("w1")) == b'{"state":2}'
    assert await small.redis.get(keys.card) == b'{"card":2}'
    for name in (keys.card, keys.worker("w1"), keys.worker("new")):
        assert await small.redis.pttl(name) > 50_000
    assert sorted(await small.redis.zrange(keys.workers, 0, -1)) == [b"new", b"w1"]


async def test_what_runs_keeps_its_lease_and_publishes_when_there_is_room(small: Wire) -> None:
    job = await small.claimed("a")
    await fill(small)
    with pytest.raises(OutOfMemoryError):
        await small.publish(following(job))
    assert await small.worker.renew([("a", job.token)], lease_ms=70_000) == Renewed([], [])
    assert await small.redis.pttl(small.keys.lease("a")) > 60_000
    await make_room(small)
    assert await small.publish(following(job)) == ["ok"]
    assert await small.types("a") == ["queued", "started", "delta"]


async def test_cancelling_works(small: Wire) -> None:
    running = await small.claimed("running")
    await small.enqueue("waiting")
    await fill(small)
    assert await small.producer.cancel("waiting") == "cancelled"
    assert await small.types("waiting") == ["queued", "finished"]
    assert await small.producer.cancel("running") == "requested"
    assert await small.worker.renew([("running", running.token)], lease_ms=5000) == Renewed(["running"], [])


async def test_what_must_end_without_an_owner_ends(small: Wire) -> None:
    await small.claimed("exhausted", payload=b"x" * 10_000)
    await small.lapse("exhausted")
    await small.enqueue("late", deadline_ms=60_000)
    await small.pass_deadline("late")
    await small.enqueue("unread", cancel_on_disconnect=True)
    await small.producer.touch_reader("unread")
    await small.redis.delete(small.keys.reader("unread"))
    await small.redis.zadd(small.keys.deadlines, {"unread": 2})
    await fill(small)
    assert await small.producer.expire() == ["late", "unread"]
    assert (await small.events("late"))[-1] == Finished(finish_reasons=(FinishReason.DEADLINE,))
    assert await small.claim(max_attempts=1) == []
    assert await small.types("exhausted") == ["queued", "started", "failed"]
    assert [letter.request_id for letter in await small.producer.dead_list()] == ["exhausted"]


async def test_a_dead_letter_is_written(small: Wire) -> None:
    job = await small.claimed("a")
    await fill(small)
    assert await small.worker.finish(following(job, kind="failed"), dead=DeadLetter("engine_crashed", 1)) == "ok"
    assert await small.types("a") == ["queued", "started", "failed"]
    assert await small.redis.exists(small.keys.dead_payload("a"))


async def test_a_job_can_be_handed_back(small: Wire) -> None:
    job = await small.claimed("a")
    await fill(small)
    assert await small.hand_back(job) == "ok"
    assert await small.job_keys("a") == {"job", "payload", "queue"}


async def test_readers_stay_present_and_looks_are_put_off(small: Wire) -> None:
    await small.enqueue("a", cancel_on_disconnect=True)
    await small.producer.touch_reader("a")
    await small.redis.pexpire(small.keys.reader("a"), 15_000)
    await small.redis.zadd(small.keys.deadlines, {"a": 1})
    await fill(small)
    assert await small.producer.expire() == []
    assert await small.redis.zscore(small.keys.deadlines, "a") > await small.now_ms()
    assert await small.producer.touch_reader("a")
    assert await small.redis.pttl(small.keys.reader("a")) > 15_000


async def test_a_takeover_is_refused_and_costs_nothing(small: Wire) -> None:
    await small.claimed("a")
    await small.lapse("a")
    await fill(small)
    for hash_is_lost in (False, True):
        if hash_is_lost:
            await small.redis.delete(small.keys.job("a"))
        before = await small.everything()
        with pytest.raises(OutOfMemoryError):
            await small.claim()
        assert await small.everything() == before
    await make_room(small)
    assert len(await small.claim()) == 1


async def test_a_reacquire_is_refused_and_works_when_there_is_room(small: Wire) -> None:
    job = await small.claimed("a")
    await small.lapse("a")
    await fill(small)
    before = await small.everything()
    with pytest.raises(OutOfMemoryError):
        await small.reacquire(job)
    assert await small.everything() == before
    await make_room(small)
    assert await small.reacquire(job) is not None


async def test_a_look_at_lapsed_leases_does_not_fail(small: Wire) -> None:
    """It would wake a worker, and cannot."""
    await small.claimed("a")
    await small.lapse("a")
    await small.redis.delete(small.keys.bell)
    await fill(small)
    assert await small.producer.expire() == []


async def test_an_idempotent_repeat_is_answered(small: Wire) -> None:
    first = await small.enqueue("a", fingerprint="f", idempotent=True)
    await fill(small)
    assert (await small.enqueue("a", fingerprint="f", idempotent=True)).generation == first.generation


@pytest.mark.parametrize("plain", [False, True])
async def test_a_claim_is_refused_and_the_job_goes_on_waiting(small: Wire, plain: bool) -> None:
    await (small.enqueue_plain("a") if plain else small.enqueue("a"))
    before = await small.job_keys("a")
    await fill(small)
    with pytest.raises(OutOfMemoryError):
        await small.claim()
    assert await small.job_keys("a") == before
    await make_room(small)
    assert [job.request_id for job in await small.claim()] == ["a"]


async def test_what_an_evicting_server_takes_of_a_waiting_job_is_told(small: Wire) -> None:
    """`volatile-*` policies may take any key that has a lifetime. The queue has none: each job in it gets its end."""
    await small.redis.config_set("maxmemory-policy", "volatile-random")
    ids = {f"job-{number}" for number in range(60)}
    for request_id in ids:
        await small.enqueue(request_id, b"x" * 10_000)
    used = (await small.redis.info("memory"))["used_memory"]
    await small.redis.config_set("maxmemory", used - 300_000)
    await small.redis.ping()  # a server evicts before it answers
    await make_room(small)

    claimed = {job.request_id for job in await small.claim(slots=100)}

    assert await small.redis.zcard(small.keys.queue) == 0
    assert 0 < len(claimed) < 60, "the server took nothing, or everything: this shows nothing"
    for request_id in ids - claimed:
        assert (await small.types(request_id))[-1] == "failed"
        assert await small.job_keys(request_id) == set()
