"""Re-acquire: an owner gets its job back in a new epoch of the same attempt, and never what is not its own any more."""

from __future__ import annotations

import pytest
from support.wire import Wire, after, following

from inferq.producer.contract import JOB_TTL_MS
from inferq.producer.events import Started
from inferq.worker.commands import Outcome


class TestALapsedLease:
    async def test_is_had_again_in_a_new_epoch(self, wire: Wire) -> None:
        job = await wire.claimed("a", deadline_ms=60_000)
        await wire.publish(following(job, 1), following(job, 2))
        await wire.lapse("a")

        got = await wire.reacquire(job, worker="worker-7", lease_ms=70_000)

        assert got is not None and got.epoch > job.epoch and got.resumed_tokens == (2,)
        assert (await wire.entries("a"))[-1][0] == got.entry_id
        assert (await wire.events("a"))[-1] == Started(
            attempt=1, worker="worker-7", resumed_tokens=(2,), queue_ms=job.queue_ms
        )
        assert await wire.job_keys("a") == {"job", "payload", "lease", "running", "deadlines"}
        assert 60_000 < await wire.redis.pttl(wire.keys.lease("a")) <= 70_000
        assert await wire.redis.zscore(wire.keys.running, "a") > await wire.now_ms() + 60_000
        again = after(job, got)
        assert await wire.publish(following(again)) == ["ok"]
        assert await wire.worker.finish(following(again, 2, kind="finished")) == "ok"
        assert await wire.job_keys("a") == set()

    async def test_costs_no_attempt(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        for _ in range(20):
            await wire.lapse("a")
            got = await wire.reacquire(job)
            assert got is not None
            job = after(job, got)
        await wire.lapse("a")
        (new,) = await wire.claim()
        assert new.attempt == 2

    async def test_keeps_the_attempt_that_it_was(self, wire: Wire) -> None:
        await wire.claimed("a")
        await wire.lapse("a")
        (second,) = await wire.claim()
        await wire.lapse("a")
        assert await wire.reacquire(second) is not None
        assert (await wire.events("a"))[-1].attempt == 2

    async def test_of_a_job_that_waits_takes_it_out_of_the_queue(self, wire: Wire) -> None:
        """A replica that lacked the claim was promoted: there the job had never left the queue."""
        job = await wire.claimed("a")
        await wire.lapse("a")
        await wire.redis.zrem(wire.keys.running, "a")
        await wire.redis.zadd(wire.keys.queue, {"a": 1})
        await wire.redis.xdel(wire.keys.events("a"), job.entry_id)
        assert await wire.reacquire(job) is not None
        assert await wire.job_keys("a") == {"job", "payload", "lease", "running"}
        assert await wire.claim() == []

    async def test_of_a_job_whose_stream_was_lost_begins_one(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.publish(following(job))
        await wire.redis.delete(wire.keys.events("a"))
        got = await wire.reacquire(job)
        assert got is not None and got.resumed_tokens == (0,)
        assert await wire.types("a") == ["started"]
        assert await wire.redis.pttl(wire.keys.events("a")) > JOB_TTL_MS - 10_000

    async def test_of_a_cancelled_job_is_told_by_the_next_renewal(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.producer.cancel("a")
        await wire.lapse("a")
        assert await wire.reacquire(job) is not None
        assert (await wire.worker.renew([("a", job.token)], lease_ms=5000)).cancelled == ["a"]


class TestAStreamThatHasMoved:
    async def test_is_gone_on_from_where_it_ends(self, wire: Wire) -> None:
        """A failover undid what the owner had published, but not its lease."""
        job = await wire.claimed("a")
        await wire.publish(*(following(job, number) for number in range(1, 4)))
        for number in (2, 3):
            await wire.redis.xdel(wire.keys.events("a"), f"{job.epoch}-{number}")
        assert await wire.publish(following(job, 4)) == [Outcome.MOVED]

        got = await wire.reacquire(job)

        assert got is not None and got.resumed_tokens == (1,)
        assert await wire.publish(following(after(job, got))) == ["ok"]
        assert [event.index for event in await wire.events("a") if event.type == "delta"] == [0, 1]

    async def test_a_repeat_takes_one_more_epoch(self, wire: Wire) -> None:
        """The first reply was lost: the caller still knows its old epoch only, but the lease is its own."""
        job = await wire.claimed("a")
        await wire.lapse("a")
        first = await wire.reacquire(job)
        second = await wire.reacquire(job)
        assert first is not None and second is not None and second.epoch > first.epoch
        assert await wire.publish(following(after(job, first))) == [Outcome.MOVED]
        assert await wire.publish(following(after(job, second))) == ["ok"]

    async def test_epochs_of_the_future_stay_below_the_new_one(self, wire: Wire) -> None:
        future = 4_000_000_000_000_000
        await wire.redis.xadd(wire.keys.events("a"), {"t": "failed", "d": "{}"}, id=f"{future}-3")
        job = await wire.claimed("a")
        got = await wire.reacquire(job)
        assert got is not None and got.epoch == future + 3


class TestWhatIsNotItsOwn:
    async def refused(self, wire: Wire, job: object) -> None:
        before = await wire.everything()
        assert await wire.reacquire(job) is None  # type: ignore[arg-type]
        assert await wire.everything() == before

    async def test_a_job_that_another_has(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.lapse("a")
        await wire.claim()
        await self.refused(wire, job)

    async def test_a_job_that_another_had_since(self, wire: Wire) -> None:
        """The other has left it too, but its reader may have seen an epoch that is above this one's."""
        job = await wire.claimed("a")
        await wire.lapse("a")
        await wire.claim()
        await wire.lapse("a")
        await self.refused(wire, job)

    async def test_a_job_that_another_handed_back(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.lapse("a")
        (new,) = await wire.claim()
        await wire.hand_back(new)
        await self.refused(wire, job)

    @pytest.mark.parametrize("ended_by", ["cancel", "finish", "expire"])
    async def test_a_job_that_has_ended(self, wire: Wire, ended_by: str) -> None:
        job = await wire.claimed("a", deadline_ms=60_000)
        if ended_by == "finish":
            await wire.worker.finish(following(job, kind="finished"))
        else:
            await wire.lapse("a")
            await wire.pass_deadline("a")
            await (wire.producer.cancel("a") if ended_by == "cancel" else wire.producer.expire())
        await self.refused(wire, job)

    async def test_a_later_job_of_the_id(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.worker.finish(following(job, kind="finished"))
        await wire.enqueue("a")
        await self.refused(wire, job)

    async def test_an_earlier_job_of_the_id_that_a_failover_brought_back(self, wire: Wire) -> None:
        first = await wire.enqueue("a")
        replica = {key: await wire.redis.dump(key) for key in await wire.redis.keys("*")}
        await wire.producer.cancel("a")
        job = await wire.claimed("a")
        await wire.redis.flushdb()
        for key, value in replica.items():
            await wire.redis.restore(key, 60_000, value)
        assert job.epoch > first.generation
        await self.refused(wire, job)

    async def test_a_job_whose_stream_has_its_terminal_entry(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.redis.xadd(wire.keys.events("a"), {"t": "finished", "d": "{}"}, id=f"{job.epoch}-9")
        await self.refused(wire, job)

    async def test_a_job_that_redis_has_lost(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.redis.flushdb()
        await self.refused(wire, job)
