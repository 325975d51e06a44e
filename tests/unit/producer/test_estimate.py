"""How long a waiting job will wait, as `status` says it."""

from __future__ import annotations

import json

import pytest
from support.wire import Wire

from inferq.producer import InferenceClient
from inferq.producer.estimate import wait_seconds


@pytest.mark.parametrize(
    ("position", "slots", "running", "ages_s", "expected"),
    [
        (0, 4, 0, [], 0.0),
        (3, 4, 0, [], 0.0),
        (0, 4, 4, [5.0, 5.0, 5.0, 5.0], 2.5),
        (7, 4, 4, [5.0, 5.0, 5.0, 5.0], 20.0),
        (1, 4, 3, [6.0, 3.0], 3.0),
        (0, 2, 4, [1.0], 0.5),
        (0, 4, 4, [], None),
    ],
)
def test_the_arithmetic(position: int, slots: int, running: int, ages_s: list[float], expected: float | None) -> None:
    assert wait_seconds(position, slots=slots, running=running, ages_s=ages_s) == expected


def test_it_is_longer_the_further_back_and_shorter_with_more_slots() -> None:
    waits = [wait_seconds(position, slots=4, running=4, ages_s=[3.0]) for position in range(20)]
    assert waits == sorted(waits) and len(set(waits)) == 20
    assert wait_seconds(5, slots=16, running=16, ages_s=[3.0]) < waits[5]


async def workers(wire: Wire, *, seen_ms: int | None = None, **slots: int) -> None:
    """Workers with so many slots that have shown themselves just now, or when it is said."""
    for name, number in slots.items():
        report = {"worker": name, "model": "tiny", "running": 0, "slots": number, "heartbeat_ms": 60_000}
        await wire.redis.set(wire.keys.worker(name), json.dumps(report), px=60_000)
        await wire.redis.zadd(wire.keys.workers, {name: await wire.now_ms() if seen_ms is None else seen_ms})


async def test_without_a_worker_nobody_can_tell(producer: InferenceClient) -> None:
    status = await producer.status(await producer.submit("x"))
    assert (status.position, status.estimated_wait_seconds) == (0, None)


async def test_the_slots_of_a_silent_worker_are_none(producer: InferenceClient, wire: Wire) -> None:
    await workers(wire, seen_ms=1, killed=4)
    status = await producer.status(await producer.submit("x"))
    assert (status.position, status.estimated_wait_seconds) == (0, None)


async def test_a_free_slot_is_no_wait(producer: InferenceClient, wire: Wire) -> None:
    await workers(wire, one=1, two=1)
    ids = [await producer.submit("x") for _ in range(3)]
    waits = [(await producer.status(each)).estimated_wait_seconds for each in ids]
    assert waits == [0.0, 0.0, None], "nothing has run yet from which more could be known"


async def test_a_wait_grows_with_the_age_of_what_runs(producer: InferenceClient, wire: Wire) -> None:
    await workers(wire, one=2)
    for request_id in ("a", "b", "c", "d"):
        await wire.enqueue(request_id)
    await wire.claim(slots=2)
    seconds, _ = await wire.redis.time()
    for request_id in ("a", "b"):  # both have run for 10 s
        await wire.redis.delete(wire.keys.events(request_id))
        await wire.redis.xadd(wire.keys.events(request_id), {"t": "x", "d": "{}"}, id=f"{(seconds - 10) * 10**6}-0")
        await wire.redis.expire(wire.keys.events(request_id), 60)
    first, second = await producer.status("c"), await producer.status("d")
    assert 10 <= first.estimated_wait_seconds < 20
    assert second.estimated_wait_seconds == pytest.approx(2 * first.estimated_wait_seconds, rel=0.2)
