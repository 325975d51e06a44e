"""Hand-back: a job waits again where it stood, with what it has published, and nobody has lost anything by it."""

from __future__ import annotations

from support.wire import Wire, following

from inferq.producer.contract import JOB_TTL_MS
from inferq.producer.events import Finished, FinishReason, Started
from inferq.worker.commands import Renewed


async def test_it_waits_again_and_goes_on_where_it_was(wire: Wire) -> None:
    job = await wire.claimed("a", payload=b"1", deadline_ms=60_000)
    await wire.publish(following(job, 1), following(job, 2))

    assert await wire.hand_back(job, 2) == "ok"

    assert await wire.job_keys("a") == {"job", "payload", "queue", "deadlines"}
    assert await wire.types("a") == ["queued", "started", "delta", "delta"]
    (new,) = await wire.claim(worker="worker-2", max_attempts=1)
    assert (new.payload, new.attempt, new.queue_ms) == (b"1", 1, job.queue_ms)
    assert new.resumed and new.resumed_tokens == (2,) and new.epoch > job.epoch
    assert (await wire.events("a"))[-1] == Started(
        attempt=1, worker="worker-2", resumed_tokens=(2,), queue_ms=job.queue_ms
    )


async def test_it_stands_at_its_old_place(wire: Wire) -> None:
    for request_id in "abc":
        await wire.enqueue(request_id)
    a, b = await wire.claim(slots=2)
    await wire.enqueue("d")
    assert await wire.hand_back(b) == "ok"
    assert await wire.hand_back(a) == "ok"
    assert await wire.order() == ["a", "b", "c", "d"]


async def test_a_deploy_after_the_other_costs_no_attempt(wire: Wire) -> None:
    await wire.enqueue("a")
    for _ in range(20):
        (job,) = await wire.claim(max_attempts=1)
        assert job.attempt == 1
        assert await wire.hand_back(job) == "ok"


async def test_the_bell_rings(wire: Wire) -> None:
    job = await wire.claimed("a")
    await wire.redis.delete(wire.keys.bell)
    await wire.hand_back(job)
    assert await wire.redis.llen(wire.keys.bell) == 1


async def test_its_lifetimes_begin_anew(wire: Wire) -> None:
    job = await wire.claimed("a")
    names = (wire.keys.job("a"), wire.keys.payload("a"), wire.keys.events("a"))
    for name in names:
        await wire.redis.pexpire(name, 60_000)
    await wire.hand_back(job)
    for name in names:
        assert await wire.redis.pttl(name) > JOB_TTL_MS - 10_000


async def test_a_cancelled_job_ends_instead(wire: Wire) -> None:
    job = await wire.claimed("a")
    await wire.publish(following(job))
    assert await wire.producer.cancel("a") == "requested"
    assert await wire.hand_back(job, 1) == "ok"
    assert (await wire.events("a"))[2:][-1] == Finished(finish_reasons=(FinishReason.CANCELLED,))
    assert await wire.types("a") == ["queued", "started", "delta", "finished"]
    assert await wire.job_keys("a") == set()


async def test_a_job_past_its_deadline_ends_instead(wire: Wire) -> None:
    job = await wire.claimed("a", deadline_ms=60_000)
    await wire.pass_deadline("a")
    assert await wire.hand_back(job) == "ok"
    assert (await wire.events("a"))[-1] == Finished(finish_reasons=(FinishReason.DEADLINE,))
    assert await wire.job_keys("a") == set()


async def test_its_owner_is_none_any_more(wire: Wire) -> None:
    job = await wire.claimed("a")
    await wire.hand_back(job)
    assert await wire.publish(following(job)) == ["fenced"]
    assert await wire.worker.finish(following(job, kind="finished")) == "fenced"
    assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed([], ["a"])
    assert await wire.types("a") == ["queued", "started"]
    assert await wire.job_keys("a") == {"job", "payload", "queue"}


async def test_a_repeat_is_ok_and_changes_nothing(wire: Wire) -> None:
    job = await wire.claimed("a")
    assert await wire.hand_back(job) == "ok"
    before = await wire.everything()
    assert await wire.hand_back(job) == "ok"
    assert await wire.everything() == before
    (new,) = await wire.claim()
    before = await wire.everything()
    assert await wire.hand_back(job) == "ok", "it was given back, whoever has it now"
    assert await wire.everything() == before
    assert await wire.publish(following(new)) == ["ok"]


async def test_somebody_who_is_not_the_owner_changes_nothing(wire: Wire) -> None:
    old = await wire.claimed("a")
    await wire.lapse("a")
    await wire.claim()
    before = await wire.everything()
    assert await wire.hand_back(old) == "fenced"
    assert await wire.everything() == before


async def test_where_the_stream_does_not_end_where_its_owner_thinks_it_stays(wire: Wire) -> None:
    """A failover may have lost what it published: first it has to send that again."""
    job = await wire.claimed("a")
    before = await wire.everything()
    assert await wire.hand_back(job, 3) == "moved"
    assert await wire.everything() == before


async def test_a_job_that_lost_its_hash_goes_to_whoever_looks_next(wire: Wire) -> None:
    job = await wire.claimed("a")
    await wire.publish(following(job))
    await wire.redis.delete(wire.keys.job("a"))
    assert await wire.hand_back(job, 1) == "ok"
    (new,) = await wire.claim()
    assert new.resumed_tokens == (1,)


async def test_given_back_work_that_is_cancelled_is_given_back_to_its_tenant(wire: Wire) -> None:
    job = await wire.claimed("a", tenant="acme", cost=5000)
    await wire.enqueue("b", tenant="acme", cost=3000)
    await wire.hand_back(job)
    await wire.producer.cancel("b")
    assert await wire.redis.zscore(wire.keys.vtime, "tenant:acme") == 5
