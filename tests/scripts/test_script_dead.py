"""Dead letters: what failed for a reason to look into can be found, looked at, and sent again under another id."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from support.wire import Wire, following

from inferq.producer.contract import DEAD_LENGTH, DEAD_TTL_MS, encode_json
from inferq.producer.errors import DuplicateRequest, InvalidRequest, QueueFull, UnknownRequest
from inferq.producer.events import Failed
from inferq.worker.commands import Claimed, DeadLetter

SECRET = "what nobody but its owner may read"
REQUEST = {"prompt": SECRET, "sampling": {"max_tokens": 7, "seed": 5}, "priority": 3, "tenant": "acme"}
PAYLOAD = encode_json({"t": None, "f": "generate", "a": [REQUEST], "k": {}, "et": 1})
CRASHED = DeadLetter("engine_crashed", 2)


async def die(wire: Wire, request_id: str = "a", payload: bytes = PAYLOAD) -> Claimed:
    job = await wire.claimed(request_id, payload=payload)
    assert await wire.worker.finish(following(job, kind="failed"), dead=CRASHED) == "ok"
    return job


async def test_a_finish_with_a_letter_leaves_the_letter_and_the_payload(wire: Wire) -> None:
    await die(wire)
    assert await wire.types("a") == ["queued", "started", "failed"]
    assert await wire.job_keys("a") == set()
    letter, payload = await wire.producer.dead_show("a")
    assert (letter.request_id, letter.reason, letter.attempts) == ("a", "engine_crashed", 2)
    assert abs(letter.died_at_ms - await wire.now_ms()) < 60_000
    assert payload == PAYLOAD
    assert DEAD_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.dead_payload("a")) <= DEAD_TTL_MS


async def test_a_letter_holds_no_text(wire: Wire) -> None:
    await die(wire)
    assert SECRET.encode() not in await wire.redis.dump(wire.keys.dead)


async def test_a_finish_without_one_leaves_none(wire: Wire) -> None:
    job = await wire.claimed("a")
    await wire.worker.finish(following(job, kind="failed"))
    assert await wire.producer.dead_list() == []
    with pytest.raises(UnknownRequest):
        await wire.producer.dead_show("a")


@pytest.mark.parametrize(
    "fields",
    [
        {"x": "y"},
        {"id": "a", "reason": "r"},
        {"id": "a", "reason": "r", "attempts": "many"},
        {"id": "a", "reason": b"\xff", "attempts": "1"},
    ],
)
async def test_an_entry_that_is_no_letter_hides_no_other(wire: Wire, fields: dict) -> None:
    await die(wire)
    await wire.redis.xadd(wire.keys.dead, fields)
    assert [letter.request_id for letter in await wire.producer.dead_list()] == ["a"]
    assert (await wire.producer.dead_show("a"))[1] == PAYLOAD


async def test_letters_behind_an_id_that_was_set_ahead_are_read(wire: Wire) -> None:
    await wire.redis.xadd(wire.keys.dead, {"x": "y"}, id=f"{2**60}-0")
    await die(wire)
    (letter,) = await wire.producer.dead_list()
    assert letter.request_id == "a"
    assert datetime.fromtimestamp(letter.died_at_ms / 1000, UTC).year == 9999


async def test_where_no_letter_can_be_written_the_job_ends_all_the_same(wire: Wire) -> None:
    await wire.redis.set(wire.keys.dead, "x")
    await die(wire)
    assert await wire.types("a") == ["queued", "started", "failed"]
    job = await wire.claimed("b")
    await wire.lapse("b")
    assert await wire.claim(max_attempts=1) == []
    assert (await wire.events("b"))[-1].code == "attempts_exhausted"
    assert await wire.publish(following(job)) == ["fenced"]
    await wire.redis.delete(wire.keys.dead)


async def test_a_repeat_writes_no_second_letter(wire: Wire) -> None:
    job = await die(wire)
    assert await wire.worker.finish(following(job, kind="failed"), dead=CRASHED) == "ok"
    assert len(await wire.producer.dead_list()) == 1


async def test_somebody_who_is_not_the_owner_writes_none(wire: Wire) -> None:
    job = await wire.claimed("a")
    await wire.lapse("a")
    before = await wire.everything()
    assert await wire.worker.finish(following(job, kind="failed"), dead=CRASHED) == "fenced"
    assert await wire.everything() == before


async def test_the_latest_are_listed_first(wire: Wire) -> None:
    for request_id in "abc":
        await die(wire, request_id)
    assert [letter.request_id for letter in await wire.producer.dead_list()] == ["c", "b", "a"]
    assert [letter.request_id for letter in await wire.producer.dead_list(2)] == ["c", "b"]


async def test_one_is_found_behind_many_others(wire: Wire) -> None:
    await die(wire)
    async with wire.redis.pipeline(transaction=False) as pipe:
        for number in range(1200):
            pipe.xadd(wire.keys.dead, {"id": f"other-{number}", "reason": "engine_crashed", "attempts": 1})
        await pipe.execute()
    letter, _ = await wire.producer.dead_show("a")
    assert letter.request_id == "a"


async def test_their_number_is_bounded(wire: Wire) -> None:
    async with wire.redis.pipeline(transaction=False) as pipe:
        for number in range(DEAD_LENGTH + 500):
            pipe.xadd(wire.keys.dead, {"id": f"other-{number}", "reason": "engine_crashed", "attempts": 1})
        await pipe.execute()
    await die(wire)
    assert await wire.redis.xlen(wire.keys.dead) < DEAD_LENGTH + 200


async def test_the_id_can_be_used_again_at_once(wire: Wire) -> None:
    await die(wire)
    job = await wire.claimed("a", payload=b"another")
    await wire.worker.finish(following(job, kind="finished"))
    assert (await wire.producer.dead_show("a"))[1] == PAYLOAD


async def test_a_job_whose_payload_was_gone_leaves_a_letter_alone(wire: Wire) -> None:
    job = await wire.claimed("a")
    await wire.redis.delete(wire.keys.payload("a"))
    await wire.worker.finish(following(job, kind="failed"), dead=CRASHED)
    letter, payload = await wire.producer.dead_show("a")
    assert letter.reason == "engine_crashed" and payload is None


class TestRequeue:
    async def test_the_request_begins_anew_under_another_id(self, wire: Wire) -> None:
        await die(wire)
        await wire.enqueue("waiting")
        enqueued = await wire.producer.dead_requeue("a", "b", max_backlog=10)
        assert enqueued.position == 0, "its priority is kept"
        (job,) = await wire.claim()
        assert (job.request_id, job.payload, job.attempt, job.resumed) == ("b", PAYLOAD, 1, False)
        fields = await wire.redis.hgetall(wire.keys.job("b"))
        assert (fields[b"tenant"], fields[b"priority"]) == (b"acme", b"3")
        assert int(fields[b"estimate"]) == 7 + len(SECRET) // 4 + 1
        assert isinstance((await wire.events("a"))[-1], Failed)

    async def test_the_letter_is_gone(self, wire: Wire) -> None:
        await die(wire)
        await wire.producer.dead_requeue("a", "b", max_backlog=10)
        assert await wire.producer.dead_list() == []
        assert not await wire.redis.exists(wire.keys.dead_payload("a"))
        with pytest.raises(UnknownRequest):
            await wire.producer.dead_requeue("a", "c", max_backlog=10)

    async def test_one_that_is_refused_stays(self, wire: Wire) -> None:
        await die(wire)
        await wire.enqueue("b")
        for new_id, bound, error in (("b", 10, DuplicateRequest), ("c", 1, QueueFull)):
            before = await wire.everything()
            with pytest.raises(error):
                await wire.producer.dead_requeue("a", new_id, max_backlog=bound)
            assert await wire.everything() == before

    async def test_of_two_at_once_one_goes_through(self, wire: Wire) -> None:
        """Both have read the letter; the script tells them apart."""
        await die(wire)
        letter, _ = await wire.producer.dead_show("a")
        await wire.enqueue("b", PAYLOAD, dead=letter)
        with pytest.raises(UnknownRequest):
            await wire.enqueue("c", PAYLOAD, dead=letter)
        assert await wire.order() == ["b"]

    async def test_of_a_payload_that_has_expired_says_so(self, wire: Wire) -> None:
        await die(wire)
        await wire.redis.delete(wire.keys.dead_payload("a"))
        with pytest.raises(UnknownRequest, match="expired"):
            await wire.producer.dead_requeue("a", "b", max_backlog=10)

    @pytest.mark.parametrize(
        "payload", [b"", b"\x80garbage", b"[]", b'{"a":[]}', b'{"a":5}', b"[" * 100_000, encode_json({"a": [{"x": 1}]})]
    )
    async def test_of_what_is_no_request_is_refused_and_stays(self, wire: Wire, payload: bytes) -> None:
        await die(wire, payload=payload or b" ")
        with pytest.raises(InvalidRequest):
            await wire.producer.dead_requeue("a", "b", max_backlog=10)
        assert len(await wire.producer.dead_list()) == 1

    async def test_an_error_says_nothing_of_what_was_asked(self, wire: Wire) -> None:
        call = json.loads(PAYLOAD)
        call["a"][0]["sampling"]["temperature"] = -1
        await die(wire, payload=encode_json(call))
        with pytest.raises(InvalidRequest) as refused:
            await wire.producer.dead_requeue("a", "b", max_backlog=10)
        assert SECRET not in str(refused.value) and refused.value.__cause__ is None
