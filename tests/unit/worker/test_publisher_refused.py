"""The publisher against a server that answers and refuses: what is written then, and what is given up."""

from __future__ import annotations

import asyncio

import pytest
from support.publishing import FINISHED, outbox, pieces, running
from support.scripted_redis import ScriptedRedis
from support.waiting import wait_until

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.events import FinishReason
from inferq.worker import background
from inferq.worker import outbox as outbox_module
from inferq.worker.commands import Outcome
from inferq.worker.errors import RedisRefuses
from inferq.worker.publisher import Publisher


class TestAFullServer:
    async def test_takes_the_end_with_all_that_it_had_refused(self) -> None:
        redis = ScriptedRedis(full=True)
        (box, _), (other, _) = outbox("a"), outbox("b")
        async with running(redis) as publisher:
            first, second, third = pieces(["one", "two", "end"])
            for each in (box, other):
                publisher.put(each, first)
            await wait_until(lambda: len(redis.calls) > 1)
            for each in (box, other):
                publisher.put(each, second)
            publisher.put(box, third, FinishReason.STOP)
            assert await publisher.finish(box, FINISHED) is Outcome.OK
            assert "".join(delta.text for delta in redis.deltas("a")) == "onetwoend"
            assert redis.deltas("a")[-1].finish_reason is FinishReason.STOP
            assert redis.streams["a"][-1].type == "finished"
            redis.full = False
            await wait_until(lambda: other.num_unpublished == 0)
        assert [delta.text for delta in redis.deltas("b")] == ["onetwo"]
        assert [entry.entry_id for entry in redis.streams["b"]] == ["7-1"]

    async def test_lets_a_cancellation_forget_what_was_certainly_not_written(self) -> None:
        redis = ScriptedRedis(full=True)
        box, _ = outbox()
        async with running(redis) as publisher:
            publisher.put(box, pieces(["one"])[0])
            await wait_until(lambda: redis.calls and box.discard())
            assert (box.num_tokens, box.num_chars, box.num_unpublished) == (0, 0, 0)
            assert await publisher.finish(box, FINISHED) is Outcome.OK
        assert [(entry.entry_id, entry.type) for entry in redis.streams["a"]] == [("7-1", "finished")]

    async def test_does_not_thaw_an_entry_that_may_stand_in_the_stream(self) -> None:
        """Its reply was lost before the server was full, so that its repeat must have the same bytes."""
        redis = ScriptedRedis(plan=["lost"] + ["full"] * 1000, gate=asyncio.Event())
        (box, _), (other, _) = outbox("a"), outbox("b")
        async with running(redis) as publisher:
            first, second = pieces(["one", "two"])
            publisher.put(box, first)
            await wait_until(lambda: redis.calls)
            publisher.put(box, second)
            publisher.put(other, first)  # what the server refuses of the next call
            redis.gate.set()
            await wait_until(lambda: len(redis.calls) > 2)
            assert box.discard()
            assert box.num_tokens == 3
            assert await publisher.finish(box, FINISHED) is Outcome.OK
        assert [delta.text for delta in redis.deltas("a")] == ["one"]
        assert [entry.type for entry in redis.streams["a"]] == ["delta", "finished"]

    async def test_that_stays_full_is_told_to_the_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outbox_module, "REFUSED_SECONDS", 0.05)
        redis = ScriptedRedis(full=True)
        box, said = outbox()
        async with running(redis) as publisher:
            publisher.put(box, pieces(["one"])[0])
            await wait_until(lambda: "stuck" in said)
            redis.full = False
            await wait_until(lambda: redis.streams)
            said.clear()
            publisher.put(box, EngineDelta(3, 3, "x", (1,)))
            await wait_until(lambda: box.num_unpublished == 0)
            assert said == []


class TestWhatRedisRefusesByItself:
    async def test_is_given_up_without_its_neighbours(self) -> None:
        redis = ScriptedRedis(poisoned={"b"}, gate=asyncio.Event())
        boxes = {name: outbox(name) for name in "abc"}
        async with running(redis) as publisher:
            for box, _ in boxes.values():
                publisher.put(box, pieces(["one"])[0])
            redis.gate.set()
            await wait_until(lambda: len(redis.streams) == 2)
            await wait_until(lambda: boxes["b"][1] == ["moved"])
            boxes["b"][0].drop()  # nobody can give it back
            for name in "ac":
                assert await publisher.finish(boxes[name][0], FINISHED) is Outcome.OK
            assert await publisher.finish(boxes["b"][0], FINISHED) is None
        assert [entry.type for entry in redis.streams["a"]] == ["delta", "finished"]
        assert [entry.type for entry in redis.streams["c"]] == ["delta", "finished"]

    async def test_in_a_state_that_lasts_is_told_to_the_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outbox_module, "REFUSED_SECONDS", 0.05)
        redis = ScriptedRedis(plan=["misconfigured"] * 1000)
        box, said = outbox()
        async with running(redis) as publisher:
            publisher.put(box, pieces(["one"])[0])
            await wait_until(lambda: said)
        assert said[0] == "MISCONF"
        assert len({entry for call in redis.calls for entry in call}) == 1

    @pytest.mark.parametrize("state", ["misconfigured", "denied"])
    async def test_at_the_end_is_given_up_after_a_while(self, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.05)
        redis = ScriptedRedis(plan=[state] * 1000)
        (box, _), (other, _) = outbox("a"), outbox("b")
        async with running(redis) as publisher:
            assert await publisher.finish(box, FINISHED) is Outcome.MOVED
            assert await publisher.hand_back(other) is Outcome.MOVED
        assert box.gone
        assert other.gone

    async def test_for_good_ends_the_publisher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.05)
        publisher = Publisher(ScriptedRedis(plan=["denied"] * 1000))
        publisher.put(outbox()[0], pieces(["one"])[0])
        with pytest.raises(RedisRefuses, match="publisher: NOPERM scripted"):
            await publisher.run()

    async def test_at_the_end_is_not_tried_for_ever(self) -> None:
        redis = ScriptedRedis(poisoned={"a"})
        async with running(redis) as publisher:
            assert await publisher.finish(outbox("a")[0], FINISHED) is Outcome.MOVED
