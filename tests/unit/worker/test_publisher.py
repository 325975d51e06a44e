"""The publisher against a scripted Redis: what is appended, whatever happens to calls and replies."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.publishing import FINISHED, outbox, pieces, running
from support.scripted_redis import ERRORS, ScriptedRedis
from support.waiting import wait_until

from inferq.engine.request import Delta as EngineDelta
from inferq.producer.events import FinishReason
from inferq.worker.commands import MAX_ENTRIES_PER_CALL, Entry, Outcome
from inferq.worker.outbox import Outbox
from inferq.worker.publisher import Publisher


async def test_what_waits_goes_in_one_entry() -> None:
    redis = ScriptedRedis()
    box, _ = outbox()
    async with running(redis) as publisher:
        for delta in pieces(["Hel", "lo", " world"]):
            publisher.put(box, delta)
        await wait_until(lambda: redis.streams)
        await publisher.finish(box, FINISHED)
    (delta,) = redis.deltas("a")
    assert (delta.text, delta.token_ids, delta.index, delta.at) == ("Hello world", tuple(range(11)), 0, 0)
    assert [entry.entry_id for entry in redis.streams["a"]] == ["7-1", "7-2"]


async def test_a_delta_that_says_nothing_makes_no_entry_and_holds_up_no_hand_back() -> None:
    redis = ScriptedRedis()
    box, _ = outbox()
    async with running(redis) as publisher:
        publisher.put(box, EngineDelta(0, 0, "", ()))
        async with asyncio.timeout(5):
            assert await publisher.hand_back(box) is Outcome.OK
    assert not redis.calls


async def test_one_call_carries_all_requests_of_a_step() -> None:
    redis = ScriptedRedis()
    boxes = [outbox(f"r{number}")[0] for number in range(MAX_ENTRIES_PER_CALL + 10)]
    async with running(redis) as publisher:
        for box in boxes:
            publisher.put(box, EngineDelta(0, 0, "x", (1,)))
        await wait_until(lambda: len(redis.streams) == len(boxes))
    assert [len(call) for call in redis.calls] == [MAX_ENTRIES_PER_CALL, 10]


async def test_never_two_calls_in_flight() -> None:
    redis = ScriptedRedis(gate=asyncio.Event())
    box, _ = outbox()
    async with running(redis) as publisher:
        first, *rest = pieces(["a", "b", "c"])
        publisher.put(box, first)
        await wait_until(lambda: redis.calls)
        for delta in rest:
            publisher.put(box, delta)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(redis.calls) == 1
        redis.gate.set()
        await publisher.finish(box, FINISHED)
    assert [delta.text for delta in redis.deltas("a")] == ["a", "bc"]


@pytest.mark.parametrize("step", ["lost", *sorted(ERRORS.keys() - {"full"})])
async def test_a_retry_carries_the_same_bytes_under_the_same_id(step: str) -> None:
    redis = ScriptedRedis(plan=[step, step, "ok", step, "ok"])
    box, _ = outbox()
    async with running(redis) as publisher:
        first, second = pieces(["one", "two"])
        publisher.put(box, first)
        await wait_until(lambda: redis.calls)
        publisher.put(box, second)  # waits: what was sent is frozen
        await wait_until(lambda: box.num_unpublished == 0)
        await publisher.finish(box, FINISHED)
    for entry_id, count in (("7-1", 3), ("7-2", 2)):
        tries = [call[0] for call in redis.calls if call[0].entry_id == entry_id]
        assert len(tries) == count
        assert len(set(tries)) == 1
    assert [delta.text for delta in redis.deltas("a")] == ["one", "two"]
    assert [entry.type for entry in redis.streams["a"]] == ["delta", "delta", "finished"]


@pytest.mark.parametrize("step", ["refused", "lost"])
async def test_the_terminal_event_is_written_once_whatever_happens_to_the_reply(step: str) -> None:
    redis = ScriptedRedis(plan=[step, step, "ok"])
    box, _ = outbox()
    async with running(redis) as publisher:
        assert await publisher.finish(box, FINISHED) is Outcome.OK
    assert [entry.type for entry in redis.streams["a"]] == ["finished"]
    assert len({call[0] for call in redis.calls}) == 1


@pytest.mark.parametrize("step", ["refused", "lost", "ok"])
async def test_the_end_takes_along_what_is_left_and_waits_for_nothing(step: str) -> None:
    """The call under way has no answer yet; its entry is the same in the end's call, and stands once."""
    redis = ScriptedRedis(plan=[step], gate=asyncio.Event())
    box, _ = outbox()
    async with running(redis) as publisher:
        first, second = pieces(["one", "two"])
        publisher.put(box, first)
        await wait_until(lambda: redis.calls)
        publisher.put(box, second, FinishReason.STOP)
        end = asyncio.create_task(publisher.finish(box, FINISHED))
        await wait_until(lambda: len(redis.calls) == 2)
        redis.gate.set()
        assert await end is Outcome.OK
    assert [entry.entry_id for entry in redis.calls[1]] == ["7-1", "7-2", "7-3"]
    assert [entry.entry_id for entry in redis.streams["a"]] == ["7-1", "7-2", "7-3"]
    assert [delta.text for delta in redis.deltas("a")] == ["one", "two"]


@pytest.mark.parametrize("last", [Outcome.FENCED, Outcome.MOVED])
async def test_a_stream_in_doubt_is_left_alone_and_its_tokens_are_kept(last: Outcome) -> None:
    """The others go on. Whether the stream comes back is not the publisher's to say."""
    redis = ScriptedRedis()
    foreign = Entry("a", "x", "7-0", "9-0", "started", "{}")
    if last is Outcome.MOVED:
        redis.streams["a"] = [foreign]
    else:
        redis.owners["a"] = "somebody else"
    (box, said), (other, other_said) = outbox("a"), outbox("b")
    async with running(redis) as publisher:
        publisher.put(box, EngineDelta(0, 0, "x", (1,)))
        publisher.put(other, EngineDelta(0, 0, "x", (1,)))
        assert await publisher.finish(other, FINISHED) is Outcome.OK
        publisher.put(box, EngineDelta(1, 1, "y", (2,)))
        end = asyncio.create_task(publisher.finish(box, FINISHED))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not end.done()
        assert (box.token_ids, box.num_unpublished) == ([1, 2], 2)
        box.drop()
        assert await end is None
    assert (said, other_said) == ([last.value], [])
    assert redis.streams.get("a", []) == ([foreign] if last is Outcome.MOVED else [])
    assert [entry.request_id for call in redis.calls for entry in call].count("a") == 1


async def test_a_job_is_handed_back_behind_all_that_was_generated() -> None:
    redis = ScriptedRedis(plan=["refused", "lost", "ok", "refused", "ok"])
    box, _ = outbox()
    async with running(redis) as publisher:
        publisher.put(box, EngineDelta(0, 0, "abc", (1, 2, 3)))
        assert await publisher.hand_back(box) is Outcome.OK
        publisher.put(box, EngineDelta(3, 3, "d", (4,)))
    assert redis.handed_back == ["a"]
    assert [delta.text for delta in redis.deltas("a")] == ["abc"]


async def test_a_delta_that_is_not_the_next_is_an_error() -> None:
    """It would leave a hole in the answer, which nobody could see any more."""
    box, _ = outbox()
    publisher = Publisher(ScriptedRedis())
    publisher.put(box, EngineDelta(0, 0, "ab", (1, 2)))
    for index, at in ((1, 2), (3, 2), (2, 1), (2, 3)):
        with pytest.raises(ValueError, match="is next"):
            publisher.put(box, EngineDelta(index, at, "c", (3,)))


async def test_a_job_is_handed_back_without_what_a_full_server_refuses() -> None:
    """The next owner makes it again; nobody waits for room."""
    redis = ScriptedRedis()
    box, _ = outbox()
    async with running(redis) as publisher:
        publisher.put(box, EngineDelta(0, 0, "in", (1, 2)))
        await wait_until(lambda: box.num_unpublished == 0)
        redis.full = True
        publisher.put(box, EngineDelta(2, 2, "out", (3, 4)))
        assert await publisher.hand_back(box) is Outcome.OK
    assert redis.handed_back == ["a"]
    assert [delta.text for delta in redis.deltas("a")] == ["in"]


async def test_a_server_that_is_full_for_a_while_costs_nothing() -> None:
    redis = ScriptedRedis(plan=["full"] * 3)
    box, said = outbox()
    async with running(redis) as publisher:
        publisher.put(box, EngineDelta(0, 0, "x", (1,)))
        assert await publisher.finish(box, FINISHED) is Outcome.OK
    assert said == []
    assert [delta.text for delta in redis.deltas("a")] == ["x"]


async def test_a_dropped_request_stops_trying() -> None:
    redis = ScriptedRedis(plan=["refused"] * 1000)
    box, _ = outbox()
    async with running(redis) as publisher:
        publisher.put(box, EngineDelta(0, 0, "x", (1,)))
        await wait_until(lambda: redis.calls)
        box.drop()
        assert await publisher.finish(box, FINISHED) is None
        redis.plan.clear()
        other, _ = outbox("b")
        publisher.put(other, EngineDelta(0, 0, "x", (1,)))
        await publisher.finish(other, FINISHED)
    assert "a" not in redis.streams


async def test_a_request_dropped_while_its_end_is_retried_gives_up() -> None:
    redis = ScriptedRedis(plan=["refused"] * 1000)
    box, _ = outbox()
    async with running(redis) as publisher:
        end = asyncio.create_task(publisher.finish(box, FINISHED))
        await wait_until(lambda: redis.calls)
        box.drop()
        assert await end is None


async def test_pressure_is_told_over_the_bound_and_when_half_is_free() -> None:
    redis = ScriptedRedis(gate=asyncio.Event())
    box, said = outbox(max_unsent_tokens=10)
    async with running(redis) as publisher:
        deltas = pieces(["abcdef", "ghij", "k", "l"])
        publisher.put(box, deltas[0])
        publisher.put(box, deltas[1])
        assert said == []
        publisher.put(box, deltas[2])
        assert said == [True]
        publisher.put(box, deltas[3])
        assert said == [True]
        redis.gate.set()
        await wait_until(lambda: box.num_unpublished == 0)
    assert said == [True, False]
    assert box.num_unpublished == 0


async def test_tokens_in_flight_count_as_unpublished() -> None:
    redis = ScriptedRedis(gate=asyncio.Event())
    box, said = outbox(max_unsent_tokens=5)
    async with running(redis) as publisher:
        first, second = pieces(["abcd", "ef"])
        publisher.put(box, first)
        await wait_until(lambda: redis.calls)
        publisher.put(box, second)
        assert box.num_unpublished == 6
        assert said == [True]


async def test_discarded_tokens_are_not_counted_and_never_sent() -> None:
    redis = ScriptedRedis(gate=asyncio.Event())
    box, _ = outbox()
    async with running(redis) as publisher:
        first, second = pieces(["abc", "def"])
        publisher.put(box, first)
        await wait_until(lambda: redis.calls)
        publisher.put(box, second)
        assert box.discard()
        assert not box.discard()
        assert (box.num_tokens, box.num_chars) == (3, 3)
        redis.gate.set()
        await publisher.finish(box, FINISHED)
    assert [delta.text for delta in redis.deltas("a")] == ["abc"]


STEPS = st.lists(st.sampled_from(["ok", "refused", "lost", "full"]), max_size=6)
TEXTS = st.lists(st.text(alphabet="abé🦙", max_size=4), min_size=1, max_size=12)


@given(
    requests=st.lists(st.tuples(TEXTS, st.lists(st.integers(0, 3), max_size=12)), min_size=1, max_size=3), plan=STEPS
)
def test_every_token_is_published_once_and_in_order(
    requests: list[tuple[list[str], list[int]]], plan: list[str]
) -> None:
    """Joined deltas equal what was put, whatever waits are in between and whatever happens to calls and replies."""

    async def produce(publisher: Publisher, box: Outbox, texts: list[str], waits: list[int]) -> None:
        for number, delta in enumerate(pieces(texts)):
            publisher.put(box, delta, FinishReason.STOP if number == len(texts) - 1 else None)
            for _ in range(waits[number] if number < len(waits) else 0):
                await asyncio.sleep(0)
        assert await publisher.finish(box, FINISHED) is Outcome.OK

    async def run() -> ScriptedRedis:
        redis = ScriptedRedis(plan=list(plan))
        async with running(redis) as publisher, asyncio.TaskGroup() as group:
            for number, (texts, waits) in enumerate(requests):
                group.create_task(produce(publisher, outbox(f"r{number}")[0], texts, waits))
        return redis

    redis = asyncio.run(run())
    for number, (texts, _) in enumerate(requests):
        deltas = redis.deltas(f"r{number}")
        joined = "".join(texts)
        assert "".join(delta.text for delta in deltas) == joined
        assert [token for delta in deltas for token in delta.token_ids] == list(range(len(joined)))
        assert [delta.index for delta in deltas] == [
            sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))
        ]
        assert [delta.at for delta in deltas] == [sum(len(d.text) for d in deltas[:i]) for i in range(len(deltas))]
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [FinishReason.STOP]
        entries = redis.streams[f"r{number}"]
        assert [entry.entry_id for entry in entries] == [f"7-{n}" for n in range(1, len(entries) + 1)]
        assert [entry.type for entry in entries] == ["delta"] * len(deltas) + ["finished"]
    if "full" in plan:
        return  # what a full server refused may come again as another entry
    sent: dict[tuple[str, str], Entry] = {}
    for entry in (entry for call in redis.calls for entry in call):
        assert sent.setdefault((entry.request_id, entry.entry_id), entry) == entry
