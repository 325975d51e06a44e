"""Claim takes over what its worker has left: before what waits, from where its stream ends, and not for ever."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.wire import Wire, following

from inferq.producer.contract import DEAD_TTL_MS, RESULT_TTL_MS, Keys
from inferq.producer.events import ErrorCode, Failed, Started


async def left(wire: Wire, request_id: str = "a", tokens: int = 0) -> None:
    """A job whose worker has died after it published so many tokens."""
    job = await wire.claimed(request_id)
    await wire.publish(*(following(job, number + 1) for number in range(tokens)))
    await wire.lapse(request_id)


class TestTheNextOwner:
    async def test_has_the_job_in_a_new_epoch_and_attempt(self, wire: Wire) -> None:
        old = await wire.claimed("a", payload=b'{"p":1}')
        await wire.publish(following(old, 1), following(old, 2))
        await wire.lapse("a")

        (new,) = await wire.claim(worker="worker-2")

        assert (new.request_id, new.payload, new.attempt, new.generation) == ("a", b'{"p":1}', 2, old.generation)
        assert new.resumed and new.resumed_tokens == (2,)
        assert new.token != old.token and new.epoch > old.epoch
        assert await wire.types("a") == ["queued", "started", "delta", "delta", "started"]
        started = (await wire.events("a"))[-1]
        assert started == Started(attempt=2, worker="worker-2", resumed_tokens=(2,), queue_ms=old.queue_ms)
        assert await wire.job_keys("a") == {"job", "payload", "lease", "running"}
        assert await wire.redis.hget(wire.keys.job("a"), "attempts") == b"1"

    async def test_goes_on_and_the_last_one_changes_nothing(self, wire: Wire) -> None:
        old = await wire.claimed("a")
        await wire.publish(following(old))
        await wire.lapse("a")
        (new,) = await wire.claim()
        assert await wire.publish(following(old, 2), following(new)) == ["fenced", "ok"]
        assert await wire.worker.finish(following(old, 2, kind="finished")) == "fenced"
        assert await wire.worker.finish(following(new, 2, kind="finished")) == "ok"
        assert [event.index for event in await wire.events("a") if event.type == "delta"] == [0, 1]
        assert await wire.job_keys("a") == set()

    async def test_of_a_job_that_is_new_has_nothing_to_resume(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        assert not job.resumed and job.resumed_tokens == (0,)

    async def test_of_a_job_that_was_only_started_resumes_at_no_token(self, wire: Wire) -> None:
        await left(wire)
        (job,) = await wire.claim()
        assert job.resumed and job.resumed_tokens == (0,)

    async def test_of_a_job_whose_stream_was_lost_begins_one(self, wire: Wire) -> None:
        await left(wire, tokens=3)
        await wire.redis.delete(wire.keys.events("a"))
        (job,) = await wire.claim()
        assert job.resumed_tokens == (0,)
        assert await wire.types("a") == ["started"]

    async def test_of_a_job_that_lost_its_hash_has_it_again(self, wire: Wire) -> None:
        await left(wire, tokens=2)
        await wire.redis.delete(wire.keys.job("a"))
        (job,) = await wire.claim()
        assert job.resumed_tokens == (2,)
        assert await wire.types("a") == ["queued", "started", "delta", "delta", "started"]
        assert await wire.job_keys("a") == {"job", "payload", "lease", "running"}


class TestWhereTheStreamEnds:
    async def test_an_owner_that_wrote_nothing_hands_the_count_on(self, wire: Wire) -> None:
        await left(wire, tokens=3)
        for _ in range(2):
            (job,) = await wire.claim(max_attempts=9)
            assert job.resumed_tokens == (3,)
            await wire.lapse("a")

    async def test_deltas_of_several_tokens_and_of_none_are_counted(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await self.append(wire, job.epoch, '{"index":0,"at":0,"text":"","token_ids":[1,2,3]}')
        await self.append(wire, job.epoch, '{"index":3,"at":0,"text":"abc","token_ids":[],"finish_reason":"stop"}')
        assert await self.resumed(wire) == (3,)

    async def test_each_choice_has_its_own_count(self, wire: Wire) -> None:
        """One choice ended long before the other: its last delta lies far back."""
        job = await wire.claimed("a", choices=3)
        assert job.resumed_tokens == (0, 0, 0)
        await self.append(wire, job.epoch, '{"choice":1,"index":0,"at":0,"text":"","token_ids":[5,6]}')
        for index in range(70):
            await self.append(wire, job.epoch, f'{{"choice":0,"index":{index},"at":0,"text":"","token_ids":[7]}}')
        assert await self.resumed(wire) == (70, 2, 0)
        epoch = int((await wire.entries("a"))[-1][0].partition("-")[0])
        await self.append(wire, epoch, '{"choice":2,"index":0,"at":0,"text":"","token_ids":[8]}')
        assert await self.resumed(wire) == (70, 2, 1)

    @pytest.mark.parametrize("data", ["", "garbage", "[]", "null", "{}", '{"index":"x","token_ids":[1]}'])
    async def test_an_entry_that_is_none_of_ours_hurts_nobody(self, wire: Wire, data: str) -> None:
        job = await wire.claimed("a")
        await wire.publish(following(job, 1), following(job, 2))
        await self.append(wire, job.epoch, data)
        await wire.redis.xadd(wire.keys.events("a"), {"t": "started", "d": data})
        await wire.enqueue("healthy")
        claimed = await self.take(wire, slots=2)
        assert [each.request_id for each in claimed] == ["a", "healthy"]

    @staticmethod
    async def append(wire: Wire, epoch: int, data: str) -> None:
        await wire.redis.xadd(wire.keys.events("a"), {"t": "delta", "d": data}, id=f"{epoch}-*")

    @staticmethod
    async def take(wire: Wire, slots: int) -> list:
        await wire.lapse("a")
        return await wire.claim(slots=slots, max_attempts=9)

    async def resumed(self, wire: Wire) -> tuple[int, ...]:
        (job,) = await self.take(wire, slots=1)
        assert (await wire.events("a"))[-1].resumed_tokens == job.resumed_tokens
        return job.resumed_tokens


class TestTheOrder:
    async def test_what_was_left_goes_before_everything_that_waits(self, wire: Wire) -> None:
        for request_id in "abc":
            await left(wire, request_id)
        for number in range(500):
            await wire.enqueue(f"waiting-{number}")
        await wire.enqueue("urgent", priority=100)
        assert {job.request_id for job in await wire.claim(slots=3)} == set("abc")
        assert [job.request_id for job in await wire.claim(slots=2)] == ["urgent", "waiting-0"]

    async def test_the_longest_left_goes_first(self, wire: Wire) -> None:
        for request_id in "abc":
            await wire.claimed(request_id)
        for request_id, ended_ms in (("a", 30), ("b", 10), ("c", 20)):
            await wire.lapse(request_id, ended_ms=ended_ms)
        assert [job.request_id for job in await wire.claim(slots=2)] == ["b", "c"]
        assert [job.request_id for job in await wire.claim(slots=2)] == ["a"]

    async def test_it_takes_no_more_than_the_free_slots(self, wire: Wire) -> None:
        for request_id in "abc":
            await left(wire, request_id)
        await wire.enqueue("waiting")
        assert await wire.claim(slots=0) == []
        assert len(await wire.claim(slots=2)) == 2
        assert len(await wire.claim(slots=2)) == 2
        assert await wire.claim(slots=2) == []

    async def test_a_worker_passes_by_what_it_still_runs(self, wire: Wire) -> None:
        """Its own lease lapsed, the job was ended and came again, and its engine has not let go of the first."""
        await left(wire)
        assert await wire.claim(exclude=["a"]) == []
        assert await wire.types("a") == ["queued", "started"]
        assert await wire.producer.cancel("a") == "cancelled"
        await wire.enqueue("a")
        await wire.enqueue("b")
        assert [job.request_id for job in await wire.claim(slots=5, exclude=["a"])] == ["b"]
        assert [job.request_id for job in await wire.claim(slots=5)] == ["a"]

    async def test_one_call_ends_a_bounded_number(self, wire: Wire) -> None:
        for number in range(150):
            await wire.enqueue(f"job-{number}")
        await wire.claim(slots=75)
        await wire.claim(slots=75, takeover=False)
        for number in range(150):
            await wire.lapse(f"job-{number}")
        remaining = []
        while not remaining or remaining[-1]:
            await wire.claim(slots=1, max_attempts=1)
            remaining.append(await wire.redis.zcard(wire.keys.running))
        assert remaining == [49, 0]


class TestWhatIsLeftAlone:
    async def test_without_takeover_they_stay(self, wire: Wire) -> None:
        await left(wire)
        assert await wire.claim(takeover=False) == []
        assert await wire.types("a") == ["queued", "started"]

    async def test_a_live_lease_is_never_taken(self, wire: Wire) -> None:
        """`running` says that it is over, the lease itself says that it is not: the lease is right."""
        job = await wire.claimed("a")
        await wire.redis.zadd(wire.keys.running, {"a": 1})
        assert await wire.claim() == []
        assert await wire.redis.zscore(wire.keys.running, "a") > await wire.now_ms()
        assert await wire.publish(following(job)) == ["ok"]

    async def test_a_lease_that_really_runs_out_is_taken_over_within_its_length(self, wire: Wire) -> None:
        await wire.enqueue("a")
        await wire.claim(lease_ms=50)
        end = time.monotonic() + 10
        while not (taken := await wire.claim()):
            assert time.monotonic() < end
            await asyncio.sleep(0.005)
        assert taken[0].attempt == 2

    async def test_an_id_that_another_model_has_taken_over_is_not_this_models(self, wire: Wire) -> None:
        await left(wire)
        await wire.redis.delete(wire.keys.payload("a"), wire.keys.job("a"), wire.keys.events("a"))
        other = Wire(wire.redis, Keys("other"))
        await other.enqueue("a")
        assert await wire.claim() == []
        assert await wire.redis.zcard(wire.keys.running) == 0
        assert await wire.types("a") == ["queued"]
        assert [job.request_id for job in await other.claim()] == ["a"]

    async def test_of_two_workers_at_once_one_has_it(self, wire: Wire) -> None:
        await left(wire)
        claims = await asyncio.gather(*(wire.claim(worker=f"worker-{number}") for number in range(8)))
        assert sorted(map(len, claims)) == [0] * 7 + [1]


class TestAttempts:
    async def test_with_the_last_one_the_job_fails_as_a_dead_letter(self, wire: Wire) -> None:
        await wire.enqueue("a", b"what it asked for", deadline_ms=60_000)
        for attempt in range(1, 4):
            (job,) = await wire.claim(max_attempts=3)
            assert job.attempt == attempt
            await wire.publish(following(job))
            await wire.lapse("a")

        assert await wire.claim(max_attempts=3) == []

        failed = (await wire.events("a"))[-1]
        assert isinstance(failed, Failed) and failed.code is ErrorCode.ATTEMPTS_EXHAUSTED and failed.attempts == 3
        assert await wire.job_keys("a") == set()
        assert RESULT_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.events("a")) <= RESULT_TTL_MS
        (letter,) = await wire.producer.dead_list()
        assert (letter.request_id, letter.reason, letter.attempts) == ("a", "attempts_exhausted", 3)
        assert await wire.redis.get(wire.keys.dead_payload("a")) == b"what it asked for"
        assert DEAD_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.dead_payload("a")) <= DEAD_TTL_MS
        assert await wire.publish(following(job, 2)) == ["fenced"]

    async def test_a_job_whose_payload_is_gone_fails_for_that(self, wire: Wire) -> None:
        await left(wire)
        await wire.redis.delete(wire.keys.payload("a"))
        assert await wire.claim(max_attempts=1) == []
        failed = (await wire.events("a"))[-1]
        assert isinstance(failed, Failed) and failed.code is ErrorCode.PAYLOAD_LOST and failed.attempts == 1
        assert await wire.producer.dead_list() == []

    async def test_it_fails_also_where_no_slot_is_free(self, wire: Wire) -> None:
        await left(wire)
        assert await wire.claim(slots=0, max_attempts=1) == []
        assert (await wire.types("a"))[-1] == "failed"

    async def test_a_lease_that_ended_while_the_taker_was_without_redis_costs_none(self, wire: Wire) -> None:
        await wire.enqueue("a")
        for _ in range(3):
            (job,) = await wire.claim(max_attempts=1, grace_end_ms=2000)
            assert job.attempt == 1
            await wire.lapse("a", ended_ms=1999)
        await wire.lapse("a", ended_ms=2000)
        assert await wire.claim(max_attempts=1, grace_end_ms=2000) == []
        assert (await wire.types("a"))[-1] == "failed"

    async def test_what_kills_every_worker_that_has_just_begun_is_not_taken_over_for_ever(self, wire: Wire) -> None:
        """Each new worker has lost touch a moment ago: what its predecessor left would cost nothing, each time."""
        await wire.enqueue("a")
        claims = 0
        while await wire.claim(max_attempts=3, grace_end_ms=10**15):
            claims += 1
            assert claims < 50
            await wire.lapse("a")
        assert claims == 1 + 10 + 2
        assert isinstance((await wire.events("a"))[-1], Failed)

    async def test_none_is_lost_to_a_takeover_that_had_no_room(self, wire: Wire) -> None:
        await left(wire)
        for _ in range(3):
            assert await wire.claim(slots=0) == []
        (job,) = await wire.claim()
        assert job.attempt == 2


class TestAClaimWhoseReplyWasLost:
    """Its worker holds leases of jobs that it has never heard of."""

    async def test_gives_its_jobs_to_the_next_call_in_the_same_attempt(self, wire: Wire) -> None:
        for request_id in "abc":
            await wire.enqueue(request_id)
        (foreign,) = await wire.claim(token="another worker's")
        lost = await wire.claim(slots=1, token="lost")

        jobs = await wire.claim(slots=2, token="found", lost_tokens=["never applied", "lost"])

        assert [(job.request_id, job.token, job.attempt) for job in jobs] == [("b", "found", 1), ("c", "found", 1)]
        assert jobs[0].resumed and jobs[0].epoch > lost[0].epoch
        assert [event.type for event in await wire.events("b")] == ["queued", "started", "started"]
        assert await wire.publish(following(lost[0]), following(jobs[0]), following(foreign)) == ["fenced", "ok", "ok"]
        assert await wire.redis.hget(wire.keys.job("b"), "attempts") == b"0"

    async def test_does_not_take_from_those_whose_lease_has_ended(self, wire: Wire) -> None:
        await wire.claimed("a")
        token = (await wire.redis.get(wire.keys.lease("a"))).decode()
        await wire.lapse("a")
        (job,) = await wire.claim(worker="somebody else")
        assert await wire.claim(lost_tokens=[token]) == []
        assert await wire.publish(following(job)) == ["ok"]

    async def test_ends_those_that_were_cancelled_meanwhile(self, wire: Wire) -> None:
        await wire.enqueue("a")
        await wire.claim(token="lost")
        await wire.producer.cancel("a")
        assert await wire.claim(lost_tokens=["lost"]) == []
        assert await wire.types("a") == ["queued", "started", "finished"]
