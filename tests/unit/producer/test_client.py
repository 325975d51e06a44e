"""Submitting, cancelling and asking, over a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import redis.asyncio
from arq.connections import ArqRedis
from support.waiting import wait_until
from support.wire import Wire, following

from inferq.producer import (
    CancelOutcome,
    DuplicateRequest,
    GenerateRequest,
    InferenceClient,
    InvalidRequest,
    Queued,
    QueueFull,
    RedisUnavailable,
    State,
    Status,
    UnknownModel,
    connect,
)
from inferq.producer.contract import Keys
from inferq.producer.payload import fingerprint


async def heartbeat(client: redis.asyncio.Redis, model: str, worker: str | None = None, **card: Any) -> None:
    """What a worker writes of itself."""
    keys, worker = Keys(model), worker or f"{model}-1"
    await client.set(keys.card, json.dumps({"model": model, "features": [], "max_num_seqs": 4} | card), px=15_000)
    report = {"worker": worker, "model": model, "running": 1, "slots": 4, "pid": 1}
    await client.set(keys.worker(worker), json.dumps(report), px=15_000)
    await client.zadd(keys.workers, {worker: 1})


async def payload(client: redis.asyncio.Redis, request_id: str) -> dict[str, Any]:
    return json.loads(await client.get(Keys.payload(request_id)))["a"][0]


async def test_a_submitted_job_is_complete(producer: InferenceClient, wire: Wire) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    request_id = await producer.submit(
        "hello", sampling={"max_tokens": 3}, priority=4, tenant="acme", deadline_ms=60_000, trace=trace
    )
    assert await wire.job_keys(request_id) == {"job", "payload", "queue", "deadlines"}
    job = await wire.redis.hgetall(wire.keys.job(request_id))
    assert (job[b"model"], job[b"tenant"], job[b"priority"], job[b"estimate"]) == (b"tiny", b"acme", b"4", b"5")
    sent = await payload(wire.redis, request_id)
    assert 0 <= sent["sampling"].pop("seed") < 2**63
    request = GenerateRequest(
        prompt="hello", sampling={"max_tokens": 3}, priority=4, tenant="acme", deadline_ms=60_000, trace=trace
    )
    assert GenerateRequest.model_validate(sent) == request
    assert job[b"fingerprint"].decode() == fingerprint(request)
    (event,) = await wire.events(request_id)
    assert event == Queued(
        v=1,
        generation=int(job[b"generation"]),
        enqueued_at_ms=int(job[b"enqueued_at_ms"]),
        trace=trace,
    )


async def test_every_way_to_pass_a_request(producer: InferenceClient, wire: Wire) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = [
        await producer.submit("hi"),
        await producer.submit({"prompt": "hi"}),
        await producer.submit(GenerateRequest(prompt="hi")),
        await producer.submit(prompt="hi"),
        await producer.submit(messages=messages),
        await producer.submit(prompt_token_ids=[1, 2, 3]),
    ]
    sent = [await payload(wire.redis, each) for each in ids]
    assert [each["prompt"] for each in sent[:4]] == ["hi"] * 4
    assert sent[4]["messages"] == messages
    assert sent[5]["prompt_token_ids"] == [1, 2, 3]
    assert len({each["sampling"]["seed"] for each in sent}) == len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt"),
        ({}, "exactly one of"),
        ({"prompt": "x", "request_id": "a:b"}, "request_id"),
        ({"prompt": "x", "request_id": ""}, "request_id"),
        ({"prompt": "x", "request_id": "a" * 65}, "request_id"),
        ({"prompt": "x", "request_id": 7}, "request_id"),
        ({"prompt": "hi \ud800"}, "prompt"),
        ({"prompt": "x", "sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"prompt": "x", "model": "a b"}, "model"),
        ({"prompt_token_ids": [512]}, "prompt_token_ids .*vocabulary of 512"),
        ({"prompt": "x", "sampling": {"stop_token_ids": [512]}}, "sampling.stop_token_ids .*vocabulary of 512"),
        ({"prompt_token_ids": [1] * 64}, "64 tokens.*max_model_len"),
        ({"prompt_token_ids": [1] * 60, "sampling": {"max_tokens": 5}}, "64 tokens.*60 or more.*5 to generate"),
        ({"prompt": "x", "sampling": {"max_tokens": 64}}, "64 tokens.*max_model_len"),
    ],
)
async def test_an_invalid_request_writes_nothing(
    producer: InferenceClient, wire: Wire, fields: dict[str, Any], message: str
) -> None:
    await heartbeat(wire.redis, "tiny", vocab_size=512, max_model_len=64)
    before = set(await wire.redis.keys())
    with pytest.raises(InvalidRequest, match=message):
        await producer.submit(**fields)
    assert set(await wire.redis.keys()) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": [511]},
        {"prompt_token_ids": [1] * 63},
        {"prompt_token_ids": [1] * 63, "sampling": {"max_tokens": 1}},
        {"prompt": "x", "sampling": {"max_tokens": 63, "stop_token_ids": [511]}},
        {"prompt": "x" * 10_000},
    ],
)
async def test_at_the_cards_limits_a_request_is_taken(
    producer: InferenceClient, wire: Wire, fields: dict[str, Any]
) -> None:
    await heartbeat(wire.redis, "tiny", vocab_size=512, max_model_len=64)
    assert (await producer.status(await producer.submit(**fields))).state is State.QUEUED


@pytest.mark.parametrize("card", [None, b"", b"{", b"[]", b'{"model": 3}', b'{"model": "tiny", "vocab_size": null}'])
async def test_without_a_card_that_can_be_read_nothing_is_checked_against_it(
    producer: InferenceClient, wire: Wire, card: bytes | None
) -> None:
    if card is not None:
        await wire.redis.set(wire.keys.card, card, px=15_000)
    await producer.submit(prompt_token_ids=[10**6])


async def test_a_new_card_is_noticed_when_the_first_one_has_grown_old(
    producer: InferenceClient, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await heartbeat(wire.redis, "tiny", vocab_size=512)
    with pytest.raises(InvalidRequest):
        await producer.submit(prompt_token_ids=[512])
    await heartbeat(wire.redis, "tiny", vocab_size=1024)
    monkeypatch.setattr("inferq.producer.submission._CARD_AGE_S", -1.0)
    await producer.submit(prompt_token_ids=[512])


async def test_an_id_can_be_used_again_when_its_job_is_over(producer: InferenceClient, wire: Wire) -> None:
    assert await producer.submit("x", request_id="mine") == "mine"
    with pytest.raises(DuplicateRequest, match="mine"):
        await producer.submit("y", request_id="mine")
    assert (await payload(wire.redis, "mine"))["prompt"] == "x"
    await producer.cancel("mine")
    await producer.submit("y", request_id="mine")
    assert (await payload(wire.redis, "mine"))["prompt"] == "y"


async def test_the_backlog_is_bounded(redis_url: str, wire: Wire) -> None:
    async with InferenceClient.from_url(redis_url, model="tiny", max_backlog=2) as producer:
        await producer.submit("x")
        await producer.submit("x")
        with pytest.raises(QueueFull, match="2 jobs") as caught:
            await producer.submit("x", request_id="third")
        assert caught.value.retry_after_seconds >= 1
        assert (await producer.status("third")).state is State.UNKNOWN


async def test_the_card_may_bound_the_backlog(producer: InferenceClient, wire: Wire) -> None:
    await heartbeat(wire.redis, "tiny", max_backlog=1)
    await producer.submit("x")
    with pytest.raises(QueueFull):
        await producer.submit("x")


async def model_of(client: redis.asyncio.Redis, request_id: str) -> str:
    return (await client.hget(Keys("any").job(request_id), "model")).decode()


async def test_the_only_model_that_is_served_is_taken(redis_url: str, wire: Wire) -> None:
    await heartbeat(wire.redis, "alone")
    async with InferenceClient.from_url(redis_url) as producer:
        assert await model_of(wire.redis, await producer.submit("x")) == "alone"


async def test_which_model_a_request_goes_to(redis_url: str, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's own, else the client's, else the environment's, which may be a folder or a repository."""
    monkeypatch.setenv("INFERQ_MODEL", "org/of-the-environment")
    async with InferenceClient.from_url(redis_url, model="of-the-client") as producer:
        assert await model_of(wire.redis, await producer.submit("x", model="own")) == "own"
        assert await model_of(wire.redis, await producer.submit("x")) == "of-the-client"
    async with InferenceClient.from_url(redis_url) as producer:
        assert await model_of(wire.redis, await producer.submit("x")) == "of-the-environment"


async def test_without_one_model_the_error_lists_them(redis_url: str, wire: Wire) -> None:
    async with InferenceClient.from_url(redis_url) as producer:
        with pytest.raises(UnknownModel, match="no worker"):
            await producer.submit("x")
        await heartbeat(wire.redis, "one")
        await heartbeat(wire.redis, "two")
        await wire.redis.zadd(wire.keys.workers, {"died-a-moment-ago": 1})
        with pytest.raises(UnknownModel, match="one, two"):
            await producer.submit("x")
        assert not await wire.redis.keys("arq:job:*")


async def test_every_call_works_for_a_job_of_another_model(redis_url: str, wire: Wire) -> None:
    """A client that was told no model finds it by the id alone."""
    await wire.enqueue("before")
    await wire.enqueue("a", deadline_ms=60_000)
    async with InferenceClient.from_url(redis_url) as producer:
        assert await producer.status("a") == Status(request_id="a", state=State.QUEUED, model="tiny", position=1)
        assert await producer.cancel("a") is CancelOutcome.CANCELLED
        assert await wire.job_keys("a") == set()
        assert (await producer.result("a")).finish_reasons == ("cancelled",)


async def test_what_cancel_answers(producer: InferenceClient, wire: Wire) -> None:
    assert await producer.cancel("nobody") is CancelOutcome.UNKNOWN
    await wire.enqueue("waiting")
    assert await producer.cancel("waiting") is CancelOutcome.CANCELLED
    assert await producer.cancel("waiting") is CancelOutcome.FINISHED
    job = await wire.claimed("running")
    assert await producer.cancel("running") is CancelOutcome.REQUESTED
    assert (await wire.worker.renew([("running", job.token)], lease_ms=60_000)).cancelled == ["running"]


async def test_a_cancelled_waiting_request_ends_with_no_choice_lost(producer: InferenceClient) -> None:
    request_id = await producer.submit("x")
    await producer.cancel(request_id)
    result = await producer.result(request_id)
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "cancelled")


async def test_the_life_of_a_request_as_status_tells_it(producer: InferenceClient, wire: Wire) -> None:
    assert await producer.status("a") == Status(request_id="a", state=State.UNKNOWN)
    await wire.enqueue("first")
    await wire.enqueue("a")
    assert await producer.status("a") == Status(request_id="a", state=State.QUEUED, model="tiny", position=1)
    _, job = await wire.claim(slots=2)
    running = Status(request_id="a", state=State.RUNNING, model="tiny", attempt=1, worker="worker-1")
    assert await producer.status("a") == running
    await wire.publish(following(job, 1))
    assert await producer.status("a") == running
    await wire.worker.finish(following(job, 2, kind="finished"))
    finished = await producer.status("a")
    assert finished == Status(request_id="a", state=State.FINISHED, finish_reasons=("stop",))
    assert finished.is_over and not running.is_over


async def test_a_job_whose_owner_died_waits_without_a_position(producer: InferenceClient, wire: Wire) -> None:
    await wire.claimed("a")
    await wire.lapse("a")
    assert await producer.status("a") == Status(request_id="a", state=State.QUEUED, model="tiny")


async def test_a_plain_arq_job_has_a_status_too(producer: InferenceClient, wire: Wire) -> None:
    await wire.enqueue_plain("a")
    assert await producer.status("a") == Status(request_id="a", state=State.QUEUED, model="tiny", position=0)


async def test_ends_as_status_tells_them(producer: InferenceClient, wire: Wire) -> None:
    await wire.enqueue("cancelled")
    await producer.cancel("cancelled")
    assert (await producer.status("cancelled")).state is State.CANCELLED
    await wire.enqueue("late", deadline_ms=60_000)
    await wire.pass_deadline("late")
    await wire.producer.expire()
    assert await producer.status("late") == Status(
        request_id="late", state=State.FINISHED, finish_reasons=("deadline",)
    )
    await wire.enqueue("failed")
    await wire.redis.delete(wire.keys.payload("failed"))
    await wire.claim()
    failed = await producer.status("failed")
    assert (failed.state, failed.error_code) == (State.FAILED, "payload_lost")
    assert failed.error_message


async def test_the_fleet(redis_url: str, producer: InferenceClient, wire: Wire) -> None:
    await heartbeat(wire.redis, "one", max_model_len=64)
    await heartbeat(wire.redis, "one", worker="one-2")
    await wire.redis.set(wire.keys.worker("broken"), b"{", px=15_000)
    await wire.redis.zadd(wire.keys.workers, {"broken": 1, "gone": 1})
    await wire.enqueue("a")
    await wire.enqueue("b")
    await wire.claim()
    fleet = await producer.fleet()
    assert [(each.model, each.waiting, each.running) for each in fleet.models] == [("one", 0, 0), ("tiny", 1, 1)]
    assert fleet.models[0].card.model == "one" and fleet.models[1].card is None
    assert sorted(worker.worker for worker in fleet.workers) == ["one-1", "one-2"]


async def test_many_submits_at_once(producer: InferenceClient, wire: Wire) -> None:
    ids = await asyncio.gather(*(producer.submit(f"prompt {number}") for number in range(100)))
    claimed = await wire.claim(slots=100)
    assert sorted(job.request_id for job in claimed) == sorted(ids)


async def test_callers_cannot_make_the_client_remember_without_end(
    producer: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferq.producer.submission._MAX_MODELS", 3)
    for number in range(10):
        await producer.submit("x", model=f"model-{number}")
    assert len(producer._submitter._models) <= 3


async def test_a_full_server_is_told(producer: InferenceClient, wire: Wire) -> None:
    await producer.submit("x")
    limit = (await wire.redis.config_get("maxmemory"))["maxmemory"]
    try:
        await wire.redis.config_set("maxmemory", 1)
        with pytest.raises(RedisUnavailable, match="full"):
            await producer.submit("x", request_id="refused")
    finally:
        await wire.redis.config_set("maxmemory", limit)
    assert (await producer.status("refused")).state is State.UNKNOWN


async def test_a_plain_arq_producer_reaches_the_same_worker(redis_url: str, wire: Wire) -> None:
    async with connect(redis_url) as plain:
        assert isinstance(plain, ArqRedis)
        job = await plain.enqueue_job("generate", {"prompt": "hi"}, _queue_name=wire.keys.queue, _job_id="a")
    assert job.job_id == "a"
    # arq rounds its time to whole milliseconds: the job's may still be to come.
    (claimed,) = await wait_until(wire.claim)
    assert json.loads(claimed.payload)["a"] == [{"prompt": "hi"}]


def test_a_name_that_cannot_be_a_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="model name"):
        InferenceClient.from_url("redis://localhost", model="a:b")
    with pytest.raises(InvalidRequest, match="prefix"):
        InferenceClient.from_url("redis://localhost", prefix="a:b")


@pytest.mark.parametrize("weight", [0, -1, 0.001, 1000, float("nan"), float("inf"), "1", None])
async def test_a_weight_that_is_none_is_refused(producer: InferenceClient, weight: Any) -> None:
    with pytest.raises(InvalidRequest, match="weight"):
        await producer.submit("x", weight=weight)


async def test_a_tenant_of_twice_the_weight_is_served_twice_as_much(producer: InferenceClient, wire: Wire) -> None:
    for tenant, weight in (("light", 1.0), ("heavy", 2.0)):
        for number in range(12):
            await producer.submit("x", tenant=tenant, weight=weight, request_id=f"{tenant}-{number}")
    served = [(await wire.claim())[0].request_id.split("-")[0] for _ in range(12)]
    assert served.count("heavy") == 8
