"""Claim: who gets which job, what is ended on the way, and what plain arq producers get."""

from __future__ import annotations

import asyncio

import pytest
from arq.connections import ArqRedis
from support.wire import Wire, following

from inferq.producer.contract import JOB_TTL_MS, MAX_CLAIM_BYTES, MAX_PAYLOAD_BYTES, RESULT_TTL_MS, Keys, encode_json
from inferq.producer.events import ErrorCode, Failed, Finished, FinishReason, Queued, Started


async def test_a_claimed_job_is_leased_moved_and_started_in_one(wire: Wire) -> None:
    enqueued = await wire.enqueue("a", b'{"p":1}', deadline_ms=60_000)

    (job,) = await wire.claim(worker='box "1"\\é', token="secret", lease_ms=5000)

    assert (job.request_id, job.token, job.payload, job.attempt) == ("a", "secret", b'{"p":1}', 1)
    assert job.generation == enqueued.generation < job.epoch
    assert job.entry_id == (await wire.entries("a"))[-1][0]
    assert job.expires_at_ms == int(await wire.redis.hget(wire.keys.job("a"), "expires_at_ms"))
    assert await wire.job_keys("a") == {"job", "payload", "lease", "running", "deadlines"}
    assert await wire.redis.get(wire.keys.lease("a")) == b"secret"
    assert 0 < await wire.redis.pttl(wire.keys.lease("a")) <= 5000
    seconds, _ = await wire.redis.time()
    assert 0 < await wire.redis.zscore(wire.keys.running, "a") - seconds * 1000 <= 6001
    started = (await wire.events("a"))[-1]
    assert started == Started(attempt=1, worker='box "1"\\é', resumed_tokens=(0,), queue_ms=job.queue_ms)
    assert 0 <= job.queue_ms < 60_000


async def test_jobs_are_served_first_come_first_served_up_to_the_free_slots(wire: Wire) -> None:
    for number in range(5):
        await wire.enqueue(f"job-{number}")
    assert [job.request_id for job in await wire.claim(slots=2)] == ["job-0", "job-1"]
    assert await wire.claim(slots=0) == []
    assert [job.request_id for job in await wire.claim(slots=10)] == ["job-2", "job-3", "job-4"]
    assert await wire.claim(slots=10) == []


async def test_one_call_takes_a_bounded_number_and_wakes_somebody_for_the_rest(wire: Wire) -> None:
    for number in range(200):
        await wire.enqueue(f"job-{number}")
    await wire.redis.delete(wire.keys.bell)
    assert len(await wire.claim(slots=4096)) == 128
    assert await wire.redis.llen(wire.keys.bell) == 1
    assert len(await wire.claim(slots=4096)) == 72


async def test_a_claim_renews_the_lifetimes_of_a_job_that_has_waited_long(wire: Wire) -> None:
    await wire.enqueue("a")
    names = (wire.keys.job("a"), wire.keys.payload("a"), wire.keys.events("a"))
    for name in names:
        await wire.redis.pexpire(name, 60_000)
    await wire.claim()
    for name in names:
        assert await wire.redis.pttl(name) > JOB_TTL_MS - 10_000


async def test_four_workers_claim_each_of_500_jobs_once(wire: Wire) -> None:
    ids = {f"job-{number}" for number in range(500)}
    for request_id in ids:
        await wire.enqueue(request_id)
    executions: list[str] = []

    async def work(name: str) -> None:
        while jobs := await wire.claim(slots=7, worker=name):
            executions.extend(job.request_id for job in jobs)
            outcomes = await asyncio.gather(*(wire.worker.finish(following(job, kind="finished")) for job in jobs))
            assert set(outcomes) == {"ok"}

    await asyncio.gather(*(work(f"worker-{number}") for number in range(4)))

    assert len(executions) == 500 and set(executions) == ids
    for request_id in ids:
        assert await wire.types(request_id) == ["queued", "started", "finished"]
    assert await wire.redis.zcard(wire.keys.running) == 0


class TestBounds:
    @pytest.mark.parametrize("plain", [False, True])
    async def test_a_payload_over_the_bound_is_refused_and_never_read(self, wire: Wire, plain: bool) -> None:
        enqueue = wire.enqueue_plain if plain else wire.enqueue
        await enqueue("most", b"x" * MAX_PAYLOAD_BYTES)
        await enqueue("over", b"x" * (MAX_PAYLOAD_BYTES + 1))
        await enqueue("after")
        assert [job.request_id for job in await wire.claim(slots=5)] == ["most", "after"]
        failed = (await wire.events("over"))[-1]
        assert isinstance(failed, Failed) and failed.code is ErrorCode.BAD_PAYLOAD
        assert str(MAX_PAYLOAD_BYTES) in failed.message
        assert await wire.job_keys("over") == set()

    async def test_an_empty_payload_is_a_payload(self, wire: Wire) -> None:
        await wire.enqueue("a", b"")
        assert [job.payload for job in await wire.claim()] == [b""]

    async def test_one_claim_returns_a_bounded_number_of_bytes_and_the_next_one_the_rest(self, wire: Wire) -> None:
        for number in range(5):
            await wire.enqueue(f"job-{number}", b"x" * (MAX_CLAIM_BYTES // 3))
        await wire.redis.delete(wire.keys.bell)
        assert len(await wire.claim(slots=10)) == 4
        assert await wire.redis.llen(wire.keys.bell) == 1, "nobody would come for the last one"
        assert len(await wire.claim(slots=10)) == 1
        assert await wire.redis.exists(wire.keys.bell) == 0


class TestTheBell:
    async def test_rings_on_when_the_slots_are_full_and_jobs_wait(self, wire: Wire) -> None:
        for number in range(3):
            await wire.enqueue(f"job-{number}")
        await wire.redis.delete(wire.keys.bell)
        await wire.claim(slots=2)
        assert await wire.redis.llen(wire.keys.bell) == 1
        assert 0 < await wire.redis.ttl(wire.keys.bell) <= 60

    async def test_falls_silent_when_nothing_waits(self, wire: Wire) -> None:
        for number in range(3):
            await wire.enqueue(f"job-{number}")
        await wire.claim(slots=3)
        assert await wire.redis.exists(wire.keys.bell) == 0

    async def test_does_not_ring_for_jobs_that_this_worker_passes_by(self, wire: Wire) -> None:
        await wire.enqueue("a")
        await wire.redis.delete(wire.keys.bell)
        assert await wire.claim(exclude=["a"]) == []
        assert await wire.claim(slots=0) == []
        assert await wire.redis.exists(wire.keys.bell) == 0

    async def test_rings_on_when_a_call_looked_at_as_many_as_it_may(self, wire: Wire) -> None:
        """One call does a bounded amount of work; what is left is for the next one, which must come."""
        for number in range(250):
            await wire.enqueue(f"job-{number}")
            await wire.redis.delete(wire.keys.payload(f"job-{number}"))
        await wire.enqueue("healthy")
        await wire.redis.delete(wire.keys.bell)
        calls = 0
        jobs = []
        while not jobs:
            jobs = await wire.claim(slots=1)
            calls += 1
            assert jobs or await wire.redis.exists(wire.keys.bell)
        assert [job.request_id for job in jobs] == ["healthy"]
        assert 2 <= calls <= 4


class TestWhatMustNotRun:
    async def test_a_cancelled_job_ends_without_being_started(self, wire: Wire) -> None:
        enqueued = await wire.enqueue("a")
        await wire.redis.set(wire.keys.cancel("a"), enqueued.generation, ex=60)
        assert await wire.claim() == []
        assert (await wire.events("a"))[1:] == [Finished(finish_reasons=(FinishReason.CANCELLED,))]
        assert await wire.job_keys("a") == set()

    async def test_a_cancellation_of_an_earlier_job_of_the_id_means_nothing(self, wire: Wire) -> None:
        enqueued = await wire.enqueue("a")
        await wire.redis.set(wire.keys.cancel("a"), enqueued.generation - 1, ex=60)
        assert len(await wire.claim()) == 1

    async def test_a_job_past_its_deadline_ends_with_it(self, wire: Wire) -> None:
        await wire.enqueue("a", deadline_ms=60_000)
        await wire.pass_deadline("a")
        assert await wire.claim() == []
        assert (await wire.events("a"))[1:] == [Finished(finish_reasons=(FinishReason.DEADLINE,))]
        assert await wire.job_keys("a") == set()

    async def test_a_job_whose_payload_is_gone_fails(self, wire: Wire) -> None:
        await wire.enqueue("a")
        await wire.enqueue("b")
        await wire.redis.delete(wire.keys.payload("a"))
        assert [job.request_id for job in await wire.claim()] == ["b"]
        failed = (await wire.events("a"))[-1]
        assert isinstance(failed, Failed) and failed.code is ErrorCode.PAYLOAD_LOST and failed.attempts == 0
        assert await wire.job_keys("a") == set()

    async def test_a_job_all_of_whose_keys_have_run_out_fails_too(self, wire: Wire) -> None:
        await wire.enqueue("a")
        await wire.redis.delete(wire.keys.payload("a"), wire.keys.job("a"), wire.keys.events("a"))
        assert await wire.claim() == []
        assert await wire.types("a") == ["failed"]
        assert await wire.job_keys("a") == set()

    async def test_a_stream_with_its_terminal_entry_is_left_as_it_is(self, wire: Wire) -> None:
        await wire.enqueue("a")
        await wire.redis.xadd(wire.keys.events("a"), {"t": "finished", "d": '{"finish_reasons":["stop"]}'})
        before = await wire.entries("a")
        assert await wire.claim() == []
        assert await wire.entries("a") == before
        assert await wire.job_keys("a") == set()

    async def test_the_stream_of_an_ended_job_stays_for_an_hour(self, wire: Wire) -> None:
        await wire.enqueue("a", deadline_ms=60_000)
        await wire.pass_deadline("a")
        await wire.claim()
        assert RESULT_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.events("a")) <= RESULT_TTL_MS

    async def test_an_id_that_another_model_has_taken_over_leaves_this_queue_alone(self, wire: Wire) -> None:
        """Its keys had run out here before it was submitted there."""
        await wire.enqueue("a")
        await wire.redis.delete(wire.keys.payload("a"), wire.keys.job("a"), wire.keys.events("a"))
        other = Wire(wire.redis, Keys("other"))
        await other.enqueue("a")
        assert await wire.claim() == []
        assert await wire.redis.zcard(wire.keys.queue) == 0
        assert [job.request_id for job in await other.claim()] == ["a"]


class TestPlainProducers:
    async def test_an_arq_job_becomes_a_job_of_ours(self, wire: Wire) -> None:
        arq = ArqRedis(wire.redis.connection_pool, job_serializer=encode_json, default_queue_name=wire.keys.queue)
        handle = await arq.enqueue_job("generate", {"prompt": "hi"}, _job_id="plain")
        assert handle is not None
        jobs = await wire.claim()
        while not jobs:  # arq's score is this clock's; the server's may be a moment behind it
            jobs = await wire.claim()
        (job,) = jobs

        assert job.request_id == "plain" and b'"prompt":"hi"' in job.payload and job.expires_at_ms is None
        queued, started = await wire.events("plain")
        assert isinstance(queued, Queued) and queued.generation == job.generation and queued.trace is None
        assert isinstance(started, Started) and 0 <= started.queue_ms < 60_000
        assert await wire.job_keys("plain") == {"job", "payload", "lease", "running"}
        assert await wire.redis.pttl(wire.keys.job("plain")) > JOB_TTL_MS - 10_000
        assert await wire.redis.pttl(wire.keys.payload("plain")) > JOB_TTL_MS - 10_000
        assert await wire.worker.finish(following(job, kind="finished")) == "ok"
        assert await wire.job_keys("plain") == set()

    async def test_a_claim_gives_them_their_place_behind_what_waits(self, wire: Wire) -> None:
        await wire.enqueue("first")
        await wire.enqueue_plain("second")
        await wire.enqueue("third")
        assert await wire.order() == ["first", "third", "second"], "its score is a time, behind every place"
        assert await wire.claim(slots=0) == []
        await wire.enqueue("fourth")
        assert [job.request_id for job in await wire.claim(slots=4)] == ["first", "third", "second", "fourth"]

    async def test_a_steady_stream_of_ours_never_holds_them_up(self, wire: Wire) -> None:
        await wire.enqueue("0")
        await wire.enqueue_plain("plain")
        claimed = []
        for number in range(1, 5):
            claimed += [job.request_id for job in await wire.claim()]
            await wire.enqueue(str(number))
        assert claimed == ["0", "plain", "1", "2"]

    async def test_one_claim_places_a_bounded_number(self, wire: Wire) -> None:
        for number in range(150):
            await wire.enqueue_plain(f"job-{number}")
        left = []
        for _ in range(2):
            await wire.claim(slots=0)
            left.append(await wire.redis.zcount(wire.keys.queue, 10**11, "+inf"))
        assert left == [50, 0]

    async def test_where_they_are_refused_they_end_with_the_reason(self, wire: Wire) -> None:
        await wire.enqueue_plain("plain")
        assert await wire.claim(accept_plain=False) == []
        queued, failed = await wire.events("plain")
        assert queued.type == "queued"
        assert isinstance(failed, Failed) and failed.code is ErrorCode.BAD_PAYLOAD and "plain arq" in failed.message
        assert await wire.job_keys("plain") == set()

    @pytest.mark.parametrize("request_id", ["a b", "a:b", "ü", "x" * 65, "", b"\xff"])
    async def test_an_id_that_is_none_ends_alone(self, wire: Wire, request_id: str | bytes) -> None:
        name = request_id if isinstance(request_id, bytes) else request_id.encode()
        await wire.redis.psetex(b"arq:job:" + name, 60_000, b"{}")
        await wire.redis.zadd(wire.keys.queue, {name: -1})
        await wire.enqueue("healthy")
        assert [job.request_id for job in await wire.claim()] == ["healthy"]
        entries = await wire.redis.xrange(b"inferq:" + name + b":events")
        assert [fields[b"t"] for _, fields in entries] == [b"queued", b"failed"]
        assert await wire.redis.exists(b"arq:job:" + name) == 0
        await wire.redis.delete(b"inferq:" + name + b":events")

    async def test_a_deferred_job_waits_for_its_time(self, wire: Wire) -> None:
        seconds, _ = await wire.redis.time()
        await wire.enqueue_plain("later", score=(seconds + 3600) * 1000)
        await wire.enqueue("now")
        assert [job.request_id for job in await wire.claim(slots=5)] == ["now"]
        assert await wire.job_keys("later") == {"payload", "queue"}

    async def test_a_score_that_is_no_time_is_no_waiting_time(self, wire: Wire) -> None:
        """arq's own clients write such a score to bring a job to the front."""
        await wire.enqueue("ours", estimate=5000)
        await wire.enqueue_plain("front", score=1)
        (job,) = await wire.claim()
        assert job.request_id == "front" and job.queue_ms < 60_000

    async def test_a_job_that_a_plain_arq_worker_runs_is_left_to_it(self, wire: Wire) -> None:
        """arq's own workers mark a running job, and leave it in the queue."""
        await wire.enqueue_plain("theirs")
        await wire.redis.set(wire.keys.lease("theirs"), b"1", px=60_000)
        await wire.enqueue("ours")
        assert [job.request_id for job in await wire.claim(slots=5)] == ["ours"]
        assert await wire.job_keys("theirs") == {"payload", "queue", "lease"}

    async def test_an_id_used_again_gets_a_stream_of_its_own(self, wire: Wire) -> None:
        job = await wire.claimed("a")
        await wire.worker.finish(following(job, kind="finished"))
        await wire.enqueue_plain("a")
        (again,) = await wire.claim()
        assert await wire.types("a") == ["queued", "started"]
        assert again.generation > job.epoch

    async def test_a_job_that_lost_its_hash_goes_on_in_its_stream(self, wire: Wire) -> None:
        """An evicting server may take `:job` alone: a second `queued` would tell readers that they lost theirs."""
        await wire.enqueue("a")
        await wire.redis.delete(wire.keys.job("a"))
        assert len(await wire.claim()) == 1
        assert await wire.types("a") == ["queued", "started"]

    async def test_a_payload_of_any_bytes_reaches_the_worker_as_it_is(self, wire: Wire) -> None:
        await wire.enqueue_plain("a", b"\x80\x04\x95\x00garbage\xff")
        (job,) = await wire.claim()
        assert job.payload == b"\x80\x04\x95\x00garbage\xff"
