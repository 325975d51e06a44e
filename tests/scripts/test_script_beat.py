"""Workers' signs of life: who is on the list, for how long, whatever the periods of the others."""

from __future__ import annotations

import pytest
from support.wire import Wire


async def listed(wire: Wire) -> set[str]:
    return {each.decode() for each in await wire.redis.zrange(wire.keys.workers, 0, -1)}


async def beat(wire: Wire, *workers: str, ttl_ms: int) -> None:
    for worker in workers:
        await wire.worker.beat(worker, "{}", "{}", ttl_ms=ttl_ms)


async def test_who_has_gone_is_taken_off_by_the_next_one(wire: Wire) -> None:
    await beat(wire, "gone", ttl_ms=60_000)
    await wire.redis.delete(wire.keys.worker("gone"))
    await wire.redis.zadd(wire.keys.workers, {"gone": 1})
    await beat(wire, "here", ttl_ms=60_000)
    assert await listed(wire) == {"here"}


async def test_who_shows_himself_less_often_than_others_stays(wire: Wire) -> None:
    await beat(wire, "seldom", ttl_ms=60_000)
    await wire.redis.zadd(wire.keys.workers, {"seldom": await wire.now_ms() - 30_000})
    await beat(wire, "often", ttl_ms=300)
    assert await listed(wire) == {"seldom", "often"}


async def test_one_call_looks_at_a_bounded_number_and_the_next_ones_at_the_rest(wire: Wire) -> None:
    await wire.redis.zadd(wire.keys.workers, {f"gone-{number}": number for number in range(250)})
    left = []
    for _ in range(3):
        await beat(wire, "here", ttl_ms=60_000)
        left.append(len(await listed(wire)))
    assert left == [151, 51, 1]


@pytest.mark.parametrize("first", [0, 1], ids=["often first", "seldom first"])
async def test_a_models_card_stays_for_who_shows_himself_least_often(wire: Wire, first: int) -> None:
    """When the other one has gone, somebody still serves the model."""
    for ttl_ms in ([300, 60_000], [60_000, 300])[first]:
        await beat(wire, f"every-{ttl_ms}", ttl_ms=ttl_ms)
    await beat(wire, "every-300", ttl_ms=300)
    assert 50_000 < await wire.redis.pttl(wire.keys.card) <= 60_000
    assert 0 < await wire.redis.pttl(wire.keys.worker("every-300")) <= 300


async def test_a_model_that_nobody_serves_any_more_has_no_card(wire: Wire) -> None:
    """It goes with the last of the workers' times, and nothing leaves it without an end."""
    for _ in range(2):
        await beat(wire, "often", ttl_ms=300)
        assert 0 < await wire.redis.pttl(wire.keys.card) <= 300
    await wire.redis.persist(wire.keys.card)
    await beat(wire, "often", ttl_ms=300)
    assert 0 < await wire.redis.pttl(wire.keys.card) <= 300
