"""One request for one idempotency key, however often it is sent."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from support.wire import Wire, following

from inferq.producer import DuplicateRequest, IdempotencyConflict, InferenceClient, InvalidRequest, QueueFull
from inferq.producer.submission import idempotent_id


async def waiting(wire: Wire) -> int:
    return await wire.redis.zcard(wire.keys.queue)


async def test_the_same_request_is_enqueued_once(producer: InferenceClient, wire: Wire) -> None:
    ids = await asyncio.gather(*(producer.submit("x", idempotency_key="order-7") for _ in range(20)))
    assert len(set(ids)) == 1
    assert await waiting(wire) == 1
    assert [event.type for event in await wire.events(ids[0])] == ["queued"]


async def test_it_is_the_same_also_when_it_has_ended(producer: InferenceClient, wire: Wire) -> None:
    request_id = await producer.submit("x", idempotency_key="k")
    (job,) = await wire.claim()
    await wire.worker.finish(following(job, 1, kind="finished"))
    assert await producer.submit("x", idempotency_key="k") == request_id
    assert await waiting(wire) == 0
    assert (await producer.result(request_id)).finish_reason == "stop"
    await wire.redis.delete(wire.keys.events(request_id))
    assert await producer.submit("x", idempotency_key="k") == request_id
    assert await waiting(wire) == 1, "its result has expired, so that it is a new one"


async def test_another_request_under_the_key_is_a_conflict(producer: InferenceClient, wire: Wire) -> None:
    request_id = await producer.submit("x", idempotency_key="k", sampling={"max_tokens": 3})
    for other in ({"prompt": "y", "sampling": {"max_tokens": 3}}, {"prompt": "x", "sampling": {"max_tokens": 4}}):
        with pytest.raises(IdempotencyConflict):
            await producer.submit(**other, idempotency_key="k")
    await producer.cancel(request_id)
    with pytest.raises(IdempotencyConflict):
        await producer.submit("y", idempotency_key="k")
    assert await waiting(wire) == 0


async def test_a_seed_that_was_drawn_does_not_make_it_another_request(producer: InferenceClient) -> None:
    assert await producer.submit("x", idempotency_key="k") == await producer.submit("x", idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        await producer.submit("x", idempotency_key="k", sampling={"seed": 1})


async def test_tenants_and_models_do_not_share_keys(producer: InferenceClient, wire: Wire) -> None:
    ids = [
        await producer.submit("x", idempotency_key="k"),
        await producer.submit("x", idempotency_key="k", tenant="acme"),
        await producer.submit("x", idempotency_key="k", model="other"),
        await producer.submit("x", idempotency_key="k2"),
    ]
    assert len(set(ids)) == 4


def test_how_the_id_follows_from_the_key() -> None:
    """As the page about the wire has it, for producers in other languages."""
    assert idempotent_id("acme", "demo", "Z é") == hashlib.sha256("4:acme,4:demo,4:Z é,".encode()).hexdigest()[:32]
    assert idempotent_id("a", "b", "1:c") != idempotent_id("a", "b1:", "c")


@pytest.mark.parametrize(
    "options",
    [
        {"idempotency_key": ""},
        {"idempotency_key": "k" * 257},
        {"idempotency_key": 7},
        {"idempotency_key": "\ud800"},
        {"idempotency_key": "k", "request_id": "mine"},
    ],
)
async def test_what_cannot_be_a_key_is_refused(producer: InferenceClient, wire: Wire, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="idempotency_key"):
        await producer.submit("x", **options)
    assert not await wire.redis.keys()


async def test_a_repetition_passes_a_full_queue(redis_url: str, wire: Wire) -> None:
    """It asks for nothing new."""
    async with InferenceClient.from_url(redis_url, model="tiny", max_backlog=1) as producer:
        request_id = await producer.submit("x", idempotency_key="k")
        with pytest.raises(QueueFull):
            await producer.submit("y")
        assert await producer.submit("x", idempotency_key="k") == request_id


async def test_an_id_without_a_key_stays_a_duplicate(producer: InferenceClient) -> None:
    request_id = await producer.submit("x", idempotency_key="k")
    with pytest.raises(DuplicateRequest):
        await producer.submit("x", request_id=request_id)
