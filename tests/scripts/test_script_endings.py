"""Cancel and expire: everything that can be ended without its owner is ended at once, and nothing else is touched."""

from __future__ import annotations

import itertools

import pytest
from support.waiting import wait_until
from support.wire import Wire, after, following

from inferq.producer.contract import JOB_TTL_MS, RESULT_TTL_MS, Keys
from inferq.producer.events import Finished, FinishReason
from inferq.worker.commands import Renewed

CANCELLED = Finished(finish_reasons=(FinishReason.CANCELLED,))
DEADLINE = Finished(finish_reasons=(FinishReason.DEADLINE,))


class TestCancel:
    async def test_of_an_unknown_id_writes_nothing(self, wire: Wire) -> None:
        assert await wire.producer.cancel("a") == "unknown"
        assert await wire.redis.keys("*") == []

    async def test_of_an_unknown_id_does_not_hit_the_next_job_of_that_id(self, wire: Wire) -> None:
        await wire.producer.cancel("a")
        job = await wire.claimed("a")
        assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed([], [])

    async def test_of_an_ended_job_writes_nothing(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.worker.finish(following(job, kind="finished"))
        before = await wire.entries("a")
        assert await wire.producer.cancel("a") == "finished"
        assert await wire.entries("a") == before
        assert await wire.job_keys("a") == set()

    async def test_of_an_ended_job_does_not_hit_the_next_job_of_that_id(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.worker.finish(following(job, kind="finished"))
        await wire.producer.cancel("a")
        job = await wire.claimed("a")
        assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed([], [])

    async def test_of_a_waiting_job_ends_it_at_once(self, wire: Wire) -> None:
        await wire.enqueue("a", deadline_ms=60_000)
        assert await wire.producer.cancel("a") == "cancelled"
        assert (await wire.events("a"))[1:] == [CANCELLED]
        assert await wire.job_keys("a") == set()
        assert RESULT_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.events("a")) <= RESULT_TTL_MS
        assert await wire.claim() == []
        assert await wire.producer.cancel("a") == "finished"

    async def test_a_cancelled_id_can_be_used_again_at_once(self, wire: Wire) -> None:
        await wire.enqueue("a")
        await wire.producer.cancel("a")
        await wire.enqueue("a")
        assert [job.request_id for job in await wire.claim()] == ["a"]
        assert await wire.types("a") == ["queued", "started"]

    async def test_of_a_running_job_tells_its_owner(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        async with wire.redis.pubsub() as control:
            await control.subscribe(wire.keys.control)
            assert await wire.producer.cancel("a") == "requested"
            message = await wait_until(
                lambda: control.get_message(ignore_subscribe_messages=True, timeout=1), what="the doorbell of the key"
            )
        assert message["data"] == b"a"
        assert await wire.redis.get(wire.keys.cancel("a")) == str(job.generation).encode()
        assert JOB_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.cancel("a")) <= JOB_TTL_MS
        assert await wire.types("a") == ["queued", "started"]
        assert await wire.producer.cancel("a") == "requested"
        assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed(["a"], [])

    async def test_of_a_job_that_its_worker_has_left_ends_it_at_once(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.publish(following(job))
        await wire.lapse("a")
        assert await wire.producer.cancel("a") == "cancelled"
        assert await wire.types("a") == ["queued", "started", "delta", "finished"]
        assert (await wire.events("a"))[-1] == CANCELLED
        assert await wire.job_keys("a") == set()

    async def test_of_a_plain_arq_job_ends_it_at_once(self, wire: Wire) -> None:
        await wire.enqueue_plain("a")
        assert await wire.producer.cancel("a") == "cancelled"
        assert await wire.types("a") == ["queued", "finished"]
        assert await wire.job_keys("a") == set()

    async def test_leaves_another_applications_arq_job_alone(self, wire: Wire) -> None:
        await wire.redis.psetex(wire.keys.payload("a"), 60_000, b"theirs")
        await wire.redis.zadd("arq:queue", {"a": 1})
        assert await wire.producer.cancel("a") == "unknown"
        assert await wire.redis.get(wire.keys.payload("a")) == b"theirs"
        await wire.redis.delete("arq:queue")

    async def test_finds_the_job_of_another_model(self, wire: Wire) -> None:
        other = Wire(wire.redis, Keys("other"))
        await other.enqueue("a", deadline_ms=60_000)
        assert await wire.producer.cancel("a") == "cancelled"
        assert await other.job_keys("a") == set()
        await other.claimed("b")
        async with wire.redis.pubsub() as control:
            await control.subscribe(other.keys.control)
            assert await wire.producer.cancel("b") == "requested"
            assert await wait_until(lambda: control.get_message(ignore_subscribe_messages=True, timeout=1))

    async def test_of_a_job_whose_stream_has_ended_only_clears_it_away(self, wire: Wire) -> None:
        await wire.enqueue("a")
        await wire.redis.xadd(wire.keys.events("a"), {"t": "finished", "d": '{"finish_reasons":["stop"]}'})
        assert await wire.producer.cancel("a") == "finished"
        assert await wire.types("a") == ["queued", "finished"]
        assert await wire.job_keys("a") == set()

    async def test_of_a_running_job_that_lost_its_hash_still_reaches_its_owner(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.redis.delete(wire.keys.job("a"))
        assert await wire.producer.cancel("a") == "requested"
        assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed(["a"], [])
        assert await wire.types("a") == ["queued", "started"]


class TestExpire:
    async def test_ends_a_waiting_job_without_any_worker_coming_for_it(self, wire: Wire) -> None:
        await wire.enqueue("a", deadline_ms=1)
        await wait_until(wire.producer.expire, what="a deadline of 1 ms")
        assert (await wire.events("a"))[1:] == [DEADLINE]
        assert await wire.job_keys("a") == set()
        assert await wire.producer.expire() == []

    async def test_leaves_what_has_time_or_an_owner(self, wire: Wire) -> None:
        await wire.claimed("running", deadline_ms=60_000)
        await wire.pass_deadline("running")
        await wire.claimed("cancelled")
        await wire.producer.cancel("cancelled")
        await wire.enqueue("early", deadline_ms=60_000)
        await wire.enqueue("timeless")
        for request_id in (None, "running", "cancelled", "early", "timeless", "unknown"):
            assert await wire.producer.expire(request_id=request_id) == []
        assert await wire.redis.zscore(wire.keys.deadlines, "running") == 1

    async def test_ends_what_lost_its_owner_and_is_past_its_deadline(self, wire: Wire) -> None:
        job = await wire.claimed("a", deadline_ms=60_000)
        await wire.publish(following(job))
        await wire.pass_deadline("a")
        await wire.lapse("a")
        assert await wire.producer.expire() == ["a"]
        assert (await wire.events("a"))[-1] == DEADLINE
        assert await wire.publish(following(job, 2)) == ["fenced"]

    async def test_ends_what_lost_its_owner_and_is_cancelled(self, wire: Wire) -> None:
        for request_id in "abc":
            await wire.claimed(request_id)
        for request_id in "ab":
            await wire.producer.cancel(request_id)
        for request_id in "abc":
            await wire.lapse(request_id)
        assert await wire.producer.expire(request_id="b") == ["b"]
        assert await wire.producer.expire() == ["a"]
        assert (await wire.events("a"))[-1] == CANCELLED
        assert await wire.types("c") == ["queued", "started"]

    async def test_wakes_a_worker_for_what_another_has_left(self, wire: Wire) -> None:
        """However seldom an idle worker looks at the queue: every worker runs this each second."""
        await wire.claimed("a")
        await wire.redis.delete(wire.keys.bell)
        assert await wire.producer.expire() == []
        assert not await wire.redis.exists(wire.keys.bell)
        await wire.lapse("a")
        assert await wire.producer.expire() == []
        assert await wire.redis.llen(wire.keys.bell) == 1
        assert await wire.types("a") == ["queued", "started"]

    async def test_looks_at_no_more_than_its_limit(self, wire: Wire) -> None:
        for number in range(7):
            await wire.enqueue(f"job-{number}", deadline_ms=60_000)
            await wire.pass_deadline(f"job-{number}")
        ended = [await wire.producer.expire(limit=3) for _ in range(4)]
        assert [len(each) for each in ended] == [3, 3, 1, 0]

    async def test_one_id_is_looked_at_alone(self, wire: Wire) -> None:
        for request_id in "ab":
            await wire.enqueue(request_id, deadline_ms=60_000)
            await wire.pass_deadline(request_id)
        assert await wire.producer.expire(request_id="b") == ["b"]
        assert await wire.types("a") == ["queued"]

    async def test_forgets_deadlines_whose_jobs_are_gone(self, wire: Wire) -> None:
        await wire.enqueue("a", deadline_ms=60_000)
        await wire.pass_deadline("a")
        await wire.redis.delete(wire.keys.job("a"), wire.keys.payload("a"))
        assert await wire.producer.expire() == []
        assert await wire.redis.zcard(wire.keys.deadlines) == 0


STEPS = ("cancel", "finish", "claim", "expire", "reacquire", "hand_back")


@pytest.mark.slow
@pytest.mark.parametrize("order", list(itertools.permutations(STEPS, 4)), ids="-".join)
@pytest.mark.parametrize("lapsed", [False, True], ids=["leased", "lapsed"])
async def test_in_any_order_of_enders_a_job_ends_once(wire: Wire, lapsed: bool, order: tuple[str, ...]) -> None:
    """A leased job is its owner's to end, a lapsed one is anybody else's; whoever comes later changes nothing."""
    job = await wire.claimed("a", deadline_ms=60_000)
    await wire.pass_deadline("a")
    if lapsed:
        await wire.lapse("a")
    started, ended = 1, False
    for step in order:
        may_end = ("cancel", "claim", "expire") if lapsed else ("finish", "hand_back")
        match step:
            case "cancel":
                await wire.producer.cancel("a")
            case "finish":
                await wire.worker.finish(following(job, kind="finished"))
            case "claim":
                assert await wire.claim() == []
            case "expire":
                await wire.producer.expire()
            case "hand_back":
                await wire.hand_back(job)
            case "reacquire":
                got = await wire.reacquire(job)
                assert (got is None) is ended
                if got is not None:
                    job, started, lapsed = after(job, got), started + 1, False
        ended = ended or step in may_end
        assert await wire.types("a") == ["queued", *["started"] * started, *["finished"] * ended]
        assert (await wire.job_keys("a") == set()) is ended
