"""Readers' presence: a job that is to be cancelled when its readers go is, once one had been there; no other job is."""

from __future__ import annotations

import pytest
from support.wire import Wire, following

from inferq.producer.contract import READER_TTL_MS
from inferq.producer.events import Finished, FinishReason
from inferq.worker.commands import Renewed

CANCELLED = Finished(finish_reasons=(FinishReason.CANCELLED,))


async def test_a_reader_is_there_for_a_while(wire: Wire) -> None:
    await wire.enqueue("a", cancel_on_disconnect=True)
    assert await wire.producer.touch_reader("a") is True
    assert READER_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.reader("a")) <= READER_TTL_MS
    due = await wire.redis.zscore(wire.keys.deadlines, "a") - await wire.now_ms()
    assert READER_TTL_MS - 10_000 < due <= READER_TTL_MS + 1


async def test_it_may_say_so_again_and_again(wire: Wire) -> None:
    await wire.enqueue("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    await wire.redis.pexpire(wire.keys.reader("a"), 5000)
    assert await wire.producer.touch_reader("a") is True
    assert await wire.redis.pttl(wire.keys.reader("a")) > READER_TTL_MS - 10_000
    assert await wire.producer.expire() == []


@pytest.mark.parametrize("known", [True, False])
async def test_of_any_other_job_nothing_is_written(wire: Wire, known: bool) -> None:
    if known:
        await wire.enqueue("a")
    before = await wire.everything()
    assert await wire.producer.touch_reader("a") is False
    assert await wire.everything() == before


async def test_of_an_ended_job_nothing_is_written(wire: Wire) -> None:
    job = await wire.claimed("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    await wire.worker.finish(following(job, kind="finished"))
    before = await wire.everything()
    assert await wire.producer.touch_reader("a") is False
    assert await wire.everything() == before
    assert await wire.job_keys("a") == set()


async def test_a_waiting_job_ends_when_its_reader_has_gone(wire: Wire) -> None:
    await wire.enqueue("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    await wire.reader_leaves("a")
    assert await wire.producer.expire() == ["a"]
    assert (await wire.events("a"))[1:] == [CANCELLED]
    assert await wire.job_keys("a") == set()


async def test_a_claim_ends_it_instead_of_starting_it(wire: Wire) -> None:
    await wire.enqueue("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    await wire.reader_leaves("a")
    assert await wire.claim() == []
    assert (await wire.events("a"))[1:] == [CANCELLED]


async def test_the_owner_of_a_running_job_is_told(wire: Wire) -> None:
    job = await wire.claimed("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed([], [])
    await wire.reader_leaves("a")
    assert await wire.producer.expire() == []
    assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed(["a"], [])


async def test_a_job_whose_worker_has_gone_too_ends(wire: Wire) -> None:
    await wire.claimed("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    await wire.reader_leaves("a")
    await wire.lapse("a")
    assert await wire.producer.expire() == ["a"]
    assert (await wire.events("a"))[-1] == CANCELLED


async def test_a_job_that_is_handed_back_ends_instead(wire: Wire) -> None:
    job = await wire.claimed("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    await wire.reader_leaves("a")
    assert await wire.hand_back(job) == "ok"
    assert (await wire.events("a"))[-1] == CANCELLED


async def test_before_a_reader_was_there_nobody_has_gone(wire: Wire) -> None:
    await wire.enqueue("a", cancel_on_disconnect=True)
    assert await wire.producer.expire() == []
    assert await wire.producer.expire(request_id="a") == []
    (job,) = await wire.claim()
    assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed([], [])


async def test_a_job_that_did_not_ask_for_it_goes_on(wire: Wire) -> None:
    job = await wire.claimed("a")
    await wire.producer.touch_reader("a")
    assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed([], [])


async def test_a_look_that_was_due_is_put_off_for_a_reader_that_is_there(wire: Wire) -> None:
    await wire.enqueue("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    await wire.redis.zadd(wire.keys.deadlines, {"a": 1})
    assert await wire.producer.expire() == []
    assert await wire.redis.zscore(wire.keys.deadlines, "a") > await wire.now_ms()


async def test_a_reader_does_not_put_off_the_deadline(wire: Wire) -> None:
    await wire.enqueue("a", cancel_on_disconnect=True, deadline_ms=5000)
    deadline = await wire.redis.zscore(wire.keys.deadlines, "a")
    await wire.producer.touch_reader("a")
    assert await wire.redis.zscore(wire.keys.deadlines, "a") == deadline


async def test_presence_counts_for_one_job_of_the_id_only(wire: Wire) -> None:
    await wire.enqueue("a", cancel_on_disconnect=True)
    await wire.producer.touch_reader("a")
    await wire.producer.cancel("a")
    await wire.enqueue("a", cancel_on_disconnect=True)
    assert not await wire.redis.exists(wire.keys.reader("a"))
    assert await wire.producer.expire() == []
    assert len(await wire.claim()) == 1
