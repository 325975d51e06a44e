"""Renew, publish and finish: what an owner may do, and that somebody who is none changes nothing."""

from __future__ import annotations

from support.wire import Wire, following

from inferq.producer.contract import JOB_TTL_MS, RESULT_TTL_MS
from inferq.worker.commands import Renewed


class TestPublish:
    async def test_entries_of_many_streams_go_out_in_one_call(self, wire: Wire) -> None:
        for request_id in "abc":
            await wire.enqueue(request_id)
        jobs = await wire.claim(slots=3)
        assert await wire.publish(*(following(job) for job in jobs)) == ["ok", "ok", "ok"]
        assert await wire.publish(*(following(job, 2) for job in jobs)) == ["ok", "ok", "ok"]
        for request_id in "abc":
            assert await wire.types(request_id) == ["queued", "started", "delta", "delta"]

    async def test_more_entries_than_one_script_call_takes_keep_their_order(self, wire: Wire) -> None:
        job = await wire.claimed()
        assert set(await wire.publish(*(following(job, number) for number in range(1, 601)))) == {"ok"}
        assert [event.index for event in (await wire.events("a"))[2:]] == list(range(600))

    async def test_a_hundred_entries_at_once_are_read_one_by_one_in_order(self, wire: Wire) -> None:
        """Ids are the owner's own count, so that no two entries of one millisecond can share or skip one."""
        job = await wire.claimed()
        await wire.publish(*(following(job, number) for number in range(1, 101)))
        position, read = job.entry_id, []
        while answer := await wire.redis.xread({wire.keys.events("a"): position}, count=1):
            ((entry_id, _),) = answer[0][1]
            position = entry_id.decode()
            read.append(position)
        assert read == [f"{job.epoch}-{number}" for number in range(1, 101)]

    async def test_a_live_stream_is_never_trimmed(self, wire: Wire) -> None:
        job = await wire.claimed()
        for start in range(1, 3000, 250):
            await wire.publish(*(following(job, number) for number in range(start, start + 250)))
        assert len(await wire.entries("a")) == 2 + 3000

    async def test_the_lifetime_is_there_after_every_entry(self, wire: Wire) -> None:
        job = await wire.claimed()
        for number in range(1, 4):
            await wire.publish(following(job, number))
            assert await wire.redis.pttl(wire.keys.events("a")) > JOB_TTL_MS - 60_000

    async def test_a_repeat_is_ok_and_appends_nothing(self, wire: Wire) -> None:
        job = await wire.claimed()
        batch = [following(job, 1), following(job, 2)]
        assert await wire.publish(*batch) == ["ok", "ok"]
        before = await wire.everything()
        assert await wire.publish(*batch) == ["ok", "ok"]
        assert await wire.publish(batch[1]) == ["ok"]
        assert await wire.everything() == before

    async def test_another_entry_under_the_same_id_is_not_a_repeat(self, wire: Wire) -> None:
        job = await wire.claimed()
        first = following(job)
        await wire.publish(first)
        before = await wire.everything()
        assert await wire.publish(first._replace(data='{"other":1}')) == ["moved"]
        assert await wire.publish(first._replace(type="prompt")) == ["moved"]
        assert await wire.everything() == before

    async def test_behind_an_unexpected_entry_nothing_is_appended(self, wire: Wire) -> None:
        job = await wire.claimed()
        before = await wire.everything()
        assert await wire.publish(following(job, 2)) == ["moved"]
        assert await wire.everything() == before

    async def test_where_the_stream_is_gone_none_is_made(self, wire: Wire) -> None:
        job = await wire.claimed()
        await wire.redis.delete(wire.keys.events("a"))
        assert await wire.publish(following(job)) == ["moved"]
        assert await wire.worker.finish(following(job, kind="finished")) == "moved"
        assert await wire.entries("a") == []

    async def test_one_fenced_request_does_not_hold_up_the_others(self, wire: Wire) -> None:
        for request_id in "ab":
            await wire.enqueue(request_id)
        a, b = await wire.claim(slots=2)
        await wire.redis.set(wire.keys.lease("a"), "somebody else", px=60_000)
        assert await wire.publish(following(a), following(b)) == ["fenced", "ok"]
        assert await wire.types("a") == ["queued", "started"]
        assert await wire.types("b") == ["queued", "started", "delta"]

    async def test_nothing_to_publish_is_no_call(self, wire: Wire) -> None:
        assert await wire.publish() == []


class TestFinish:
    async def test_nothing_remains_but_the_stream(self, wire: Wire) -> None:
        job = await wire.claimed(deadline_ms=60_000)
        assert await wire.worker.finish(following(job, kind="finished")) == "ok"
        assert await wire.types("a") == ["queued", "started", "finished"]
        assert await wire.job_keys("a") == set()
        assert RESULT_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.events("a")) <= RESULT_TTL_MS
        assert await wire.redis.keys("*") == [wire.keys.events("a").encode()]

    async def test_a_cancelled_job_can_be_finished(self, wire: Wire) -> None:
        job = await wire.claimed()
        await wire.producer.cancel("a")
        assert await wire.worker.finish(following(job, kind="finished")) == "ok"
        assert await wire.job_keys("a") == set()

    async def test_takes_along_what_was_not_published(self, wire: Wire) -> None:
        job = await wire.claimed(deadline_ms=60_000)
        entries = [following(job, 1), following(job, 2), following(job, 3, kind="finished")]
        assert await wire.publish(entries[0]) == ["ok"]
        assert await wire.worker.finish(*entries) == "ok"
        assert await wire.types("a") == ["queued", "started", "delta", "delta", "finished"]
        assert await wire.redis.keys("*") == [wire.keys.events("a").encode()]
        assert RESULT_TTL_MS - 10_000 < await wire.redis.pttl(wire.keys.events("a")) <= RESULT_TTL_MS
        before = await wire.everything()
        assert await wire.worker.finish(*entries) == "ok"
        assert await wire.publish(*entries[:2]) == ["ok", "ok"]
        assert await wire.everything() == before

    async def test_behind_an_unexpected_entry_nothing_is_taken_along(self, wire: Wire) -> None:
        job = await wire.claimed()
        await wire.redis.xadd(wire.keys.events("a"), {"t": "x", "d": "{}"}, id=f"{job.epoch}-9")
        before = await wire.everything()
        assert await wire.worker.finish(following(job), following(job, 2, kind="finished")) == "moved"
        assert await wire.everything() == before

    async def test_a_repeat_is_ok_and_changes_nothing(self, wire: Wire) -> None:
        job = await wire.claimed()
        end = following(job, kind="finished")
        assert await wire.worker.finish(end) == "ok"
        before = await wire.everything()
        assert await wire.worker.finish(end) == "ok"
        assert await wire.everything() == before

    async def test_a_late_repeat_does_not_touch_the_next_job_of_the_id(self, wire: Wire) -> None:
        job = await wire.claimed()
        end = following(job, kind="finished")
        await wire.worker.finish(end)
        await wire.claimed()
        before = await wire.everything()
        assert await wire.worker.finish(end) == "fenced"
        assert await wire.everything() == before

    async def test_behind_an_unexpected_entry_the_job_stays(self, wire: Wire) -> None:
        job = await wire.claimed()
        before = await wire.everything()
        assert await wire.worker.finish(following(job, 2, kind="finished")) == "moved"
        assert await wire.everything() == before


class TestAFencedOwner:
    async def test_changes_nothing_when_another_has_the_job(self, wire: Wire) -> None:
        old = await wire.claimed()
        await wire.lapse("a")
        await wire.producer.cancel("a")
        new = await wire.claimed()
        before = await wire.everything()

        assert await wire.publish(following(old)) == ["fenced"]
        assert await wire.worker.finish(following(old, kind="finished")) == "fenced"
        assert await wire.worker.renew([("a", old.token)], lease_ms=99_000) == Renewed([], ["a"])

        assert await wire.everything() == before
        assert await wire.publish(following(new)) == ["ok"]

    async def test_changes_nothing_when_the_job_has_ended(self, wire: Wire) -> None:
        old = await wire.claimed()
        await wire.lapse("a")
        await wire.producer.cancel("a")
        before = await wire.everything()

        assert await wire.publish(following(old)) == ["fenced"]
        assert await wire.worker.finish(following(old, kind="finished")) == "fenced"
        assert await wire.worker.renew([("a", old.token)], lease_ms=99_000) == Renewed([], ["a"])

        assert await wire.everything() == before
        assert await wire.types("a") == ["queued", "started", "finished"]

    async def test_is_one_whose_lease_lapsed_though_nobody_took_it(self, wire: Wire) -> None:
        job = await wire.claimed()
        await wire.lapse("a")
        before = await wire.everything()
        assert await wire.publish(following(job)) == ["fenced"]
        assert await wire.worker.finish(following(job, kind="finished")) == "fenced"
        assert await wire.everything() == before


class TestRenew:
    async def test_renews_lease_place_and_lifetimes(self, wire: Wire) -> None:
        job = await wire.claimed()
        await wire.producer.cancel("a")
        keys = wire.keys
        names = (keys.job("a"), keys.payload("a"), keys.events("a"), keys.cancel("a"))
        for name in (*names, keys.lease("a")):
            await wire.redis.pexpire(name, 30_000)
        await wire.redis.zadd(keys.running, {"a": 1})

        renewed = await wire.worker.renew([("a", job.token)], lease_ms=90_000)

        assert renewed == Renewed(["a"], [])
        for name in names:
            assert await wire.redis.pttl(name) > JOB_TTL_MS - 10_000
        assert 80_000 < await wire.redis.pttl(keys.lease("a")) <= 90_000
        seconds, _ = await wire.redis.time()
        assert await wire.redis.zscore(keys.running, "a") > (seconds + 80) * 1000

    async def test_tells_the_cancelled_and_the_lost_apart(self, wire: Wire) -> None:
        for request_id in "abcd":
            await wire.enqueue(request_id)
        owned = [(job.request_id, job.token) for job in await wire.claim(slots=4)]
        await wire.producer.cancel("b")
        await wire.lapse("c")
        await wire.redis.set(wire.keys.cancel("d"), "1", px=60_000)  # meant for an earlier job of that id
        assert await wire.worker.renew(owned, lease_ms=5000) == Renewed(["b"], ["c"])

    async def test_a_job_that_lost_its_hash_is_not_taken_for_cancelled(self, wire: Wire) -> None:
        job = await wire.claimed()
        await wire.redis.delete(wire.keys.job("a"))
        assert await wire.worker.renew([("a", job.token)], lease_ms=5000) == Renewed([], [])

    async def test_nothing_owned_is_nothing_lost(self, wire: Wire) -> None:
        assert await wire.worker.renew([], lease_ms=5000) == Renewed([], [])
