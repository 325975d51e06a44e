"""Streams that are got back: what they hold afterwards, whatever was lost and whenever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_redis import ScriptedRedis
from support.waiting import wait_until

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.contract import Keys
from inferq.producer.events import Delta, Failed, Finished, FinishReason, Started, decode_event
from inferq.worker import background
from inferq.worker.commands import Entry, Outcome
from inferq.worker.errors import Dropped
from inferq.worker.outbox import Hold, Outbox
from inferq.worker.progress import BrokenStream, Progress, read_progress
from inferq.worker.publisher import Publisher
from inferq.worker.recovery import Recovery

KEYS = Keys("tiny")
FINISHED = Finished(finish_reasons=(FinishReason.STOP,))


class Owner:
    """A request that notes why it was dropped."""

    def __init__(self, recovery: Recovery, request_id: str) -> None:
        self.dropped: list[str] = []
        self.outbox = Outbox(
            request_id=request_id,
            token="token",
            generation=1,
            epoch=7,
            max_unsent_tokens=1000,
            on_pressure=lambda over: None,
            on_lost=lambda why: recovery.get_back(self),
            on_stuck=lambda reason: None,
        )

    def drop(self, why: str) -> None:
        self.dropped.append(why)
        self.outbox.drop()


class Line:
    """A publisher and a recovery over one scripted server."""

    def __init__(self, redis: ScriptedRedis) -> None:
        self.redis = redis
        self.publisher = Publisher(redis)
        self.recovery = Recovery(redis, self.publisher, redis, KEYS, worker="w", lease_ms=1000)

    def owner(self, request_id: str = "a") -> Owner:
        return Owner(self.recovery, request_id)

    def put(self, owner: Owner, text: str, reason: FinishReason | None = None) -> None:
        """One delta, with as many tokens as characters."""
        box = owner.outbox
        self.publisher.put(box, EngineDelta(box.num_tokens, box.num_chars, text, tuple(map(ord, text))), reason)

    async def put_and_see(self, owner: Owner, text: str) -> None:
        self.put(owner, text)
        await owner.outbox.settled.wait()


@asynccontextmanager
async def running(redis: ScriptedRedis) -> AsyncIterator[Line]:
    line = Line(redis)
    tasks = [asyncio.create_task(line.publisher.run()), asyncio.create_task(line.recovery.run())]
    try:
        yield line
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def held(redis: ScriptedRedis, request_id: str = "a") -> Progress:
    """What a reader of the stream has in the end."""
    progress = Progress()
    for entry in redis.streams[request_id]:
        progress.add(entry.entry_id, decode_event({b"t": entry.type.encode(), b"d": entry.data.encode()}))
    return progress


async def test_a_lease_that_lapsed_is_taken_again_in_a_new_epoch() -> None:
    redis = ScriptedRedis()
    async with running(redis) as line:
        owner = line.owner()
        await line.put_and_see(owner, "abc")
        redis.lapse("a")
        owner.outbox.lose("the lease has lapsed")
        line.put(owner, "def", FinishReason.STOP)
        assert await line.publisher.finish(owner.outbox, FINISHED) is Outcome.OK
    assert [(e.entry_id, e.type) for e in redis.streams["a"]] == [
        ("7-1", "delta"),
        ("17-0", "started"),
        ("17-1", "delta"),
        ("17-2", "finished"),
    ]
    assert held(redis).text == "abcdef"
    assert owner.dropped == []


async def test_what_a_failover_lost_is_sent_again() -> None:
    redis = ScriptedRedis()
    async with running(redis) as line:
        owner = line.owner()
        for text in ("ab", "cd", "ef"):
            await line.put_and_see(owner, text)
        redis.lose_tail("a", 1)
        line.put(owner, "gh", FinishReason.LENGTH)
        await line.publisher.finish(owner.outbox, FINISHED)
    assert [delta.text for delta in redis.deltas("a")] == ["ab", "cdefgh"]
    assert redis.deltas("a")[-1].finish_reason is FinishReason.LENGTH
    assert held(redis).text == "abcdefgh"


async def test_a_failover_that_lost_an_end_already_sent_gets_it_again() -> None:
    redis = ScriptedRedis()
    async with running(redis) as line:
        owner = line.owner()
        line.put(owner, "ab", FinishReason.STOP)
        line.publisher.wake(owner.outbox)
        await owner.outbox.settled.wait()
        redis.lose_tail("a", 0)
        assert await line.publisher.finish(owner.outbox, FINISHED) is Outcome.OK
    assert [entry.type for entry in redis.streams["a"]] == ["started", "delta", "finished"]
    assert redis.deltas("a")[0].finish_reason is FinishReason.STOP


async def test_a_tail_that_an_earlier_owner_wrote_is_sent_again_too() -> None:
    redis = ScriptedRedis()
    async with running(redis) as line:
        first = line.owner()
        await line.put_and_see(first, "abc")
        second = line.owner()
        second.outbox.continue_from(await line.recovery.read("a"))
        second.outbox.lose("the test says so")
        await line.put_and_see(second, "d")
        redis.lose_tail("a", 0)
        line.put(second, "e", FinishReason.STOP)
        await line.publisher.finish(second.outbox, FINISHED)
    assert held(redis).text == "abcde"


@pytest.mark.parametrize("owner_now", ["somebody else", None])
async def test_a_job_that_is_somebody_elses_is_dropped(owner_now: str | None) -> None:
    """Also where that one has lost it again: its epoch is above the one that is known here."""
    redis = ScriptedRedis()
    async with running(redis) as line:
        owner = line.owner()
        await line.put_and_see(owner, "abc")
        redis.owners["a"] = owner_now
        redis.streams["a"].append(Entry("a", "somebody else", "7-1", "9-0", "started", "{}"))
        before = list(redis.streams["a"])
        line.put(owner, "def")
        end = asyncio.create_task(line.publisher.finish(owner.outbox, FINISHED))
        assert await end is None
        line.put(owner, "ghi")
    assert owner.dropped == ["lease lost"]
    assert redis.streams["a"] == before


async def test_a_stream_with_more_than_was_made_here_goes_back_to_the_queue() -> None:
    redis = ScriptedRedis()
    async with running(redis) as line:
        owner = line.owner()
        await line.put_and_see(owner, "abc")
        redis.streams["a"].append(
            Entry("a", "x", "7-1", "7-2", "delta", '{"index":3,"at":3,"text":"X","token_ids":[88]}')
        )
        line.put(owner, "def")
        await wait_until(lambda: owner.dropped)
    assert redis.handed_back == ["a"]
    assert held(redis).text == "abcX"


async def test_a_broken_stream_goes_back_to_the_queue() -> None:
    redis = ScriptedRedis()
    redis.streams["a"] = [Entry("a", "x", "7-0", "7-1", "delta", '{"index":5,"at":5,"text":"X","token_ids":[88]}')]
    async with running(redis) as line:
        owner = line.owner()
        line.put(owner, "abc")
        await wait_until(lambda: owner.dropped)
        assert redis.handed_back == ["a"]
        with pytest.raises(BrokenStream):
            await line.recovery.read("a")


@pytest.mark.parametrize("step", ["refused", "lost"])
async def test_getting_back_survives_what_happens_to_its_calls(step: str) -> None:
    redis = ScriptedRedis()
    async with running(redis) as line:
        owner, other = line.owner("a"), line.owner("b")
        await line.put_and_see(owner, "abc")
        redis.plan = [step, step, "ok", step, "ok"]
        for each in (owner, other):
            redis.lapse(each.outbox.request_id)
            each.outbox.lose("the lease has lapsed")
            line.put(each, "def", FinishReason.STOP)
        for each in (owner, other):
            assert await line.publisher.finish(each.outbox, FINISHED) is Outcome.OK
    assert (held(redis, "a").text, held(redis, "b").text) == ("abcdef", "def")


async def test_what_is_refused_for_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease lapses then, and whoever claims the job next goes on from what was published."""
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 0.05)
    redis = ScriptedRedis(plan=["misconfigured"] * 1000)
    async with running(redis) as line:
        owner = line.owner()
        owner.outbox.lose("the lease has lapsed")
        await wait_until(lambda: owner.dropped)
        assert owner.dropped == ["Redis refuses to give it back: MISCONF"]
        with pytest.raises(Dropped, match="refuses to read it: MISCONF"):
            await line.recovery.read("a")


async def test_nothing_is_asked_for_a_request_that_was_dropped_meanwhile() -> None:
    redis = ScriptedRedis()
    line = Line(redis)
    owner = line.owner()
    owner.outbox.lose("the lease has lapsed")
    owner.outbox.drop()
    task = asyncio.create_task(line.recovery.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert redis.streams == {}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_late_answer_to_an_entry_of_before_changes_nothing() -> None:
    """The call was under way when the stream was lost; it is got back before the answer comes."""
    redis = ScriptedRedis()
    owner = Line(redis).owner()
    box = owner.outbox
    box.add(EngineDelta(0, 0, "ab", (1, 2)), None)
    entry = box.freeze()
    box.lose("the lease has lapsed")
    assert box.restart(20, Progress())
    box.answer(entry, Outcome.MOVED)
    assert (box.hold, box.num_unpublished) == (Hold.HELD, 2)
    again = box.freeze()
    assert (again.expected_id, again.entry_id, again.data) == ("20-0", "20-1", entry.data)


@pytest.mark.parametrize(
    ("reason", "ids", "is_own"), [("stop", (1, 2), True), ("cancelled", (1, 2), False), ("stop", (1,), False)]
)
def test_nobody_goes_on_behind_an_end_that_is_not_his_own(reason: str, ids: tuple[int, ...], is_own: bool) -> None:
    """A later owner, whose claim a failover has undone, had ended the answer by its last delta."""
    box = Line(ScriptedRedis()).owner().outbox
    box.add(EngineDelta(0, 0, "ab", (1, 2)), FinishReason.STOP)
    box.lose("the lease has lapsed")
    progress = Progress()
    progress.add(*entry(0, delta(0, 0, "ab"[: len(ids)], *ids, reason=reason)))
    assert box.restart(20, progress) is is_own


def entry(number: int, event: Any) -> tuple[str, Any]:
    return f"{1_764_000_000_000_000 + number}-0", event


def delta(index: int, at: int, text: str, *ids: int, reason: str | None = None, choice: int = 0) -> Delta:
    return Delta(index=index, at=at, text=text, token_ids=ids, finish_reason=reason, choice=choice)


def test_progress_takes_of_each_delta_what_is_new() -> None:
    progress = Progress()
    started = Started(attempt=1, worker="w", resumed_tokens=(0,), queue_ms=3.5)
    events = [started, delta(0, 0, "ab", 1, 2), None, started, delta(1, 1, "bcd", 2, 3, 4), delta(4, 4, "", 5)]
    for number, event in enumerate([*events, delta(5, 4, "e", reason="length")]):
        progress.add(*entry(number, event))
    assert (progress.token_ids, progress.text, progress.num_chars) == ([1, 2, 3, 4, 5], "abcde", 5)
    assert progress.finish_reason is FinishReason.LENGTH
    assert progress.started_ms == 1_764_000_000_000.0


@pytest.mark.parametrize("hole", [delta(3, 2, "x", 9), delta(2, 3, "x", 9), delta(2, 2, "x", 9, choice=1)])
def test_progress_goes_over_no_hole(hole: Delta) -> None:
    progress = Progress()
    progress.add(*entry(0, delta(0, 0, "ab", 1, 2)))
    with pytest.raises(BrokenStream):
        progress.add(*entry(1, hole))


async def test_what_is_no_event_breaks_a_stream() -> None:
    redis = ScriptedRedis(streams={"a": [Entry("a", "x", "7-0", "7-1", "delta", "[]")]})
    with pytest.raises(BrokenStream):
        await read_progress(redis, KEYS, "a")


DISTURBANCES = st.sampled_from(["lapse", "lose", "tail", "wait", "none", "none"])
TEXTS = st.lists(st.tuples(st.text(alphabet="abé🦙", max_size=4), DISTURBANCES), min_size=1, max_size=12)
PLAN = st.lists(st.sampled_from(["ok", "ok", "refused", "lost"]), max_size=12)


@given(texts=TEXTS, plan=PLAN, cut=st.integers(0, 3))
def test_whatever_is_lost_the_answer_is_whole_and_ends_once(
    texts: list[tuple[str, str]], plan: list[str], cut: int
) -> None:
    redis = ScriptedRedis(plan=list(plan))

    async def disturb(line: Line, owner: Owner, what: str) -> None:
        match what:
            case "lapse":
                redis.lapse("a")
            case "lose":
                redis.lapse("a")
                owner.outbox.lose("the lease has lapsed")
            case "tail":
                redis.lose_tail("a", max(0, len(redis.streams.setdefault("a", [])) - cut))
            case "wait":
                line.publisher.wake(owner.outbox)  # the last delta else goes with the end
                await owner.outbox.settled.wait()

    async def run() -> list[str]:
        async with running(redis) as line:
            owner = line.owner()
            for number, (text, what) in enumerate(texts):
                line.put(owner, text, FinishReason.STOP if number == len(texts) - 1 else None)
                await asyncio.sleep(0)
                await disturb(line, owner, what)
            outcome = await line.publisher.finish(owner.outbox, FINISHED)
            assert (outcome is Outcome.OK) == (owner.dropped == [])
            return owner.dropped

    dropped = asyncio.run(run())
    expected = "".join(text for text, _ in texts)
    progress = held(redis)
    kinds = [entry.type for entry in redis.streams["a"]]
    if dropped:
        # A lease that lapses again while the answer to a re-acquire is lost: whoever claims next goes on from here.
        assert "lost" in plan
        assert expected.startswith(progress.text)
        assert "finished" not in kinds
    else:
        assert (progress.text, progress.token_ids) == (expected, [ord(char) for char in expected])
        assert progress.finish_reason is FinishReason.STOP
        assert kinds.count("finished") == 1
        assert kinds[-1] == "finished"
    ids = [tuple(map(int, entry.entry_id.split("-"))) for entry in redis.streams["a"]]
    assert ids == sorted(set(ids))


async def test_a_failure_is_written_behind_a_stream_that_was_got_back() -> None:
    redis = ScriptedRedis()
    async with running(redis) as line:
        owner = line.owner()
        await line.put_and_see(owner, "abc")
        redis.lose_tail("a", 0)
        event = Failed(code="internal", message="m", attempts=1)
        assert await line.publisher.finish(owner.outbox, event) is Outcome.OK
    assert held(redis).text == "abc"
    assert redis.streams["a"][-1].type == "failed"
