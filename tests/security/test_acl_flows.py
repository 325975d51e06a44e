"""Producer, worker and reader, each as its own user of the ACL file: all that they do is allowed, none of it lacks.

After each test the server's own log of refusals is looked at: it names every call that a user had no right to.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from arq.connections import ArqRedis
from support.acl import PASSWORDS, USERS_FILE, Secured
from support.queue import ENDLESS, KEYS, MODEL, answer_to, left_over, scripted_worker
from support.streams import assert_unbroken, until_delta, until_ended
from support.waiting import wait_until

from inferq.producer import (
    CancelOutcome,
    EngineFailure,
    InferenceClient,
    NotDurable,
    State,
    connect,
    decode_json,
    encode_json,
)
from inferq.producer.address import pool_like

SLOW = ["--step-ms", "10"]


@pytest.fixture
async def producer(secured: Secured) -> AsyncIterator[InferenceClient]:
    async with InferenceClient.from_url(secured.url("producer"), model=MODEL) as client:
        yield client


@pytest.fixture
async def reader(secured: Secured) -> AsyncIterator[InferenceClient]:
    async with InferenceClient.from_url(secured.url("reader"), model=MODEL) as client:
        yield client


@pytest.fixture(autouse=True)
async def nothing_is_refused(secured: Secured, admin: redis.asyncio.Redis) -> AsyncIterator[None]:
    yield
    refused = [each for each in secured.refusals() if each != ("reader", "evalsha")]
    assert refused == []
    assert await left_over(admin) <= {KEYS.dead}


async def test_a_request_from_its_submission_to_its_last_token(
    secured: Secured, producer: InferenceClient, reader: InferenceClient
) -> None:
    waiting = await producer.submit("hello", sampling={"max_tokens": 8}, deadline_ms=600_000)
    assert (await reader.status(waiting)).state is (await producer.status(waiting)).state is State.QUEUED
    early = asyncio.create_task(reader.result(waiting))
    async with scripted_worker(secured.url("worker"), engine=SLOW):
        assert (await early).text == answer_to("hello", 8)
        running = await producer.submit("more", sampling={"max_tokens": 60}, idempotency_key="once")
        assert await producer.submit("more", sampling={"max_tokens": 60}, idempotency_key="once") == running
        both = await asyncio.gather(reader.result(running), producer.result(running))
        assert {each.text for each in both} == {answer_to("more", 60)}
        assert [(each.model, bool(each.card)) for each in (await reader.fleet()).models] == [(MODEL, True)]
        assert len((await producer.fleet()).workers) == len((await reader.fleet()).workers) == 1
        async with InferenceClient.from_url(secured.url("producer")) as anybody:
            assert (await anybody.result(await anybody.submit("only model", sampling={"max_tokens": 2}))).text
        probe = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "inferq.worker.probe", stderr=PIPE,
            env={**os.environ, "INFERQ_REDIS_URL": secured.url("worker")},
        )  # fmt: skip
        assert (await probe.communicate(), probe.returncode) == ((None, b""), 0)
    assert (await reader.status(running)).state is (await producer.status(running)).state is State.FINISHED


async def test_a_server_that_keeps_nothing_is_warned_of(secured: Secured, admin: redis.asyncio.Redis) -> None:
    """The worker's user may not ask for snapshots: then the warning says what is known."""
    await admin.config_set("appendonly", "no")
    try:
        async with scripted_worker(secured.url("worker"), engine=SLOW) as worker:
            assert '"save": null' in worker.log and "redis.keeps_nothing" in worker.log
        await admin.acl_log_reset()  # of the one refusal that there is to be
    finally:
        await admin.config_set("appendonly", "yes")


async def test_cancelled_overdue_and_forsaken(
    secured: Secured, admin: redis.asyncio.Redis, producer: InferenceClient
) -> None:
    unclaimed = await producer.submit("x", deadline_ms=300)
    assert (await producer.result(unclaimed)).finish_reason == "deadline"
    waiting = await producer.submit("x")
    assert await producer.cancel(waiting) is CancelOutcome.CANCELLED
    async with scripted_worker(secured.url("worker"), engine=SLOW):
        running = await producer.submit("x", sampling=ENDLESS)
        await until_delta(admin, KEYS, running)
        assert (await producer.status(running)).state is State.RUNNING
        assert await producer.cancel(running) is CancelOutcome.REQUESTED
        late = await producer.submit("x", sampling=ENDLESS, deadline_ms=400)
        forsaken = await producer.submit("x", sampling=ENDLESS, cancel_on_disconnect=True)
        async with producer.stream(forsaken) as events:
            async for event in events:
                if event.type == "delta":
                    break
        assert await admin.delete(KEYS.reader(forsaken)) == 1
        for request_id, reason in ((running, "cancelled"), (late, "deadline"), (forsaken, "cancelled")):
            assert (await until_ended(admin, KEYS, request_id))[-1].finish_reasons == (reason,)


@pytest.mark.slow
async def test_taken_over_and_handed_back(
    secured: Secured, admin: redis.asyncio.Redis, producer: InferenceClient, reader: InferenceClient
) -> None:
    flags = ("--lease-seconds", "1", "--drain-seconds", "0")
    request_id = await producer.submit("long", sampling={"max_tokens": 300})
    answer = asyncio.create_task(reader.result(request_id))
    for number, ending in enumerate((signal.SIGKILL, signal.SIGTERM, None), start=1):
        async with scripted_worker(secured.url("worker"), *flags, engine=SLOW) as worker:
            if ending is not None:
                await until_delta(admin, KEYS, request_id, at_least=60 * number)
                worker.send(ending)
                assert await worker.wait() == (0 if ending is signal.SIGTERM else -ending)
            else:
                assert (await answer).text == answer_to("long", 300)
    assert_unbroken(await until_ended(admin, KEYS, request_id), answer_to("long", 300))


async def test_a_dead_letter_is_looked_at_and_enqueued_again(secured: Secured, producer: InferenceClient) -> None:
    async with scripted_worker(secured.url("worker"), engine=["--exit-on-text", "poison"]):
        request_id = await producer.submit("poison", sampling={"max_tokens": 3})
        with pytest.raises(EngineFailure):
            await producer.result(request_id)
    assert [letter.request_id for letter in await producer.dead_letters()] == [request_id]
    _, request = await producer.dead_letter(request_id)
    assert request is not None and request.prompt == "poison"
    again = await producer.requeue(request_id)
    async with scripted_worker(secured.url("worker")):
        assert (await producer.result(again)).text == answer_to("poison", 3)


async def test_a_durable_submission(secured: Secured, producer: InferenceClient, admin: redis.asyncio.Redis) -> None:
    info: dict[str, Any] = await admin.info("server")
    if info["redis_version"] < "7.2":
        with pytest.raises(NotDurable, match=r"older than 7\.2"):
            await producer.submit("x", durable=True)
        return
    request_id = await producer.submit("x", durable=True)
    assert await producer.cancel(request_id) is CancelOutcome.CANCELLED


async def test_jobs_of_plain_arq_producers_are_taken(secured: Secured, admin: redis.asyncio.Redis) -> None:
    """With the rights that `deploy/redis/README.md` names for a user of theirs."""
    readme = USERS_FILE.with_name("README.md").read_text(encoding="utf-8")
    (rights,) = re.findall(r"arq producer needs a user of its own with\s+`(.*?)`, on\s+`(.*?)`", readme)
    password = PASSWORDS["producer"]
    await admin.execute_command("ACL", "SETUSER", "plain", "reset", "on", f">{password}", *" ".join(rights).split())
    try:
        async with connect(secured.url("producer")) as template:
            pool = pool_like(template.connection_pool, {"username": "plain", "lib_name": None, "lib_version": None})
        arq = ArqRedis(pool, job_serializer=encode_json, job_deserializer=decode_json)
        request = {"prompt": "plain", "sampling": {"max_tokens": 3}}
        job = await arq.enqueue_job("generate", request, _queue_name=KEYS.queue)
        await arq.aclose()
        await pool.disconnect()
        assert job is not None
        async with scripted_worker(secured.url("worker")):
            assert (await until_ended(admin, KEYS, job.job_id))[-1].finish_reasons == ("length",)
    finally:
        await admin.acl_deluser("plain")


class TestAReaderWhoMayOnlyRead:
    async def test_reads_to_the_end_and_asks_once(
        self, secured: Secured, admin: redis.asyncio.Redis, producer: InferenceClient, reader: InferenceClient
    ) -> None:
        """Others end what is due; it waits for them, however often it finds that nothing has come."""
        reader._source.block_ms = 20
        ids = [await producer.submit("x", sampling={"max_tokens": 4}, cancel_on_disconnect=True) for _ in range(3)]
        answers = [asyncio.create_task(reader.result(request_id)) for request_id in ids]
        await wait_until(lambda: not reader._source.may_write)
        async with scripted_worker(secured.url("worker"), engine=SLOW):
            for answer in answers:
                assert (await answer).text == answer_to("x", 4)
        assert await admin.exists(*map(KEYS.reader, ids)) == 0
        asked: list[dict[str, Any]] = await admin.acl_log()
        assert {(entry["username"], entry["object"]) for entry in asked} == {("reader", "evalsha")}
        assert sum(int(entry["count"]) for entry in asked) <= len(ids), "each stream at most once before it was known"

    async def test_readers_that_come_later_join_the_read_that_is_blocked(
        self, secured: Secured, admin: redis.asyncio.Redis, producer: InferenceClient, reader: InferenceClient
    ) -> None:
        """An entry in a stream of their process' own ends that read: the only thing that such a user may write."""
        ids = [await producer.submit("x", sampling={"max_tokens": 4}) for _ in range(10)]
        answers = [asyncio.create_task(reader.result(request_id)) for request_id in ids]
        await wait_until(lambda: admin.keys("*:wake"))
        async with scripted_worker(secured.url("worker")):
            assert {(await answer).text for answer in answers} == {answer_to("x", 4)}
