"""The loop behind one connection, with a line whose answers come when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from inferq.producer.multiplexer import Subscription
from inferq.producer.position import EntryId
from inferq.producer.shard import Shard

START = EntryId(0, 0)


class Line:
    """One client: reads that are blocked, and the pipeline that wakes them, whose own answer may be late."""

    def __init__(self) -> None:
        self.reads: list[tuple[dict[str, str], asyncio.Future[list[Any]]]] = []
        self.num_wakes = 0
        self.answers_to_wakes = asyncio.Event()
        self.answers_to_wakes.set()
        self.wakes_end_reads = True

    @property
    def keys(self) -> set[str]:
        """What the read that is blocked now asks for."""
        return set(self.reads[-1][0]) - {"wake"}

    async def xread(self, streams: dict[str, str], *, count: int, block: int) -> list[Any]:
        self.reads.append((streams, asyncio.get_running_loop().create_future()))
        return await self.reads[-1][1]

    def pipeline(self, *, transaction: bool) -> Any:
        return self._wake()

    @asynccontextmanager
    async def _wake(self) -> AsyncIterator[Line]:
        yield self

    def xadd(self, key: str, fields: Any, *, id: str, maxlen: int, approximate: bool) -> None:
        self.num_wakes += 1
        if self.wakes_end_reads:
            self.answer({"wake": [id]})

    def pexpire(self, key: str, ttl_ms: int) -> None:
        assert ttl_ms > 0

    async def execute(self) -> None:
        await self.answers_to_wakes.wait()

    def answer(self, ids: dict[str, list[str]]) -> None:
        """End the blocked read with entries of these ids."""
        found = [[key.encode(), [(each.encode(), {}) for each in entries]] for key, entries in ids.items()]
        self.reads[-1][1].set_result(found)


async def turns(number: int = 20) -> None:
    """Everything that can happen without the line has happened."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.fixture
async def line() -> Line:
    return Line()


@pytest.fixture
async def shard(line: Line) -> AsyncIterator[Shard]:
    shard = Shard(line, "wake", lambda *_: None)  # type: ignore[arg-type]
    yield shard
    shard._task.cancel()
    await asyncio.gather(shard._task, return_exceptions=True)


def watch(shard: Shard, key: str) -> tuple[Subscription, asyncio.Task[list[Any]]]:
    subscription = Subscription(shard, key, START)
    shard.add(subscription)
    return subscription, asyncio.create_task(subscription.next(START, 60))


async def test_who_comes_while_a_wake_is_being_answered_is_not_forgotten(shard: Shard, line: Line) -> None:
    """The entry has ended the first read, and the next is blocked, before the answer to the writing comes."""
    watch(shard, "a")
    await turns()
    line.answers_to_wakes.clear()
    watch(shard, "b")
    await turns()
    assert (line.keys, line.num_wakes) == ({"a", "b"}, 1)
    _, waiting = watch(shard, "c")
    await turns()
    assert line.keys == {"a", "b"}
    line.answers_to_wakes.set()
    await turns()
    assert (line.keys, line.num_wakes) == ({"a", "b", "c"}, 2)
    line.answer({"c": ["1-0"]})
    assert len(await waiting) == 1


async def test_many_who_come_at_once_wake_it_once(shard: Shard, line: Line) -> None:
    watch(shard, "first")
    await turns()
    for number in range(50):
        watch(shard, f"r{number}")
    await turns()
    assert (len(line.keys), line.num_wakes, len(line.reads)) == (51, 1, 2)


async def test_a_read_that_does_not_end_yet_is_woken_once(shard: Shard, line: Line) -> None:
    watch(shard, "a")
    await turns()
    line.wakes_end_reads = False
    watch(shard, "b")
    await turns(200)
    assert line.num_wakes == 1
    line.answer({"wake": ["1-0"]})
    await turns()
    assert line.keys == {"a", "b"}


async def test_a_consumer_that_comes_back_at_once_wakes_nothing(shard: Shard, line: Line) -> None:
    watch(shard, "idle")
    subscription, waiting = watch(shard, "a")
    for number in range(1, 20):
        await turns()
        line.answer({"a": [f"1-{number}"]})
        await waiting
        waiting = asyncio.create_task(subscription.next(EntryId(1, number), 60))
    await turns()
    assert (line.num_wakes, len(line.reads)) == (0, 20)
    assert line.reads[-1][0] == {"wake": "0-0", "idle": "0-0", "a": "1-19"}


async def test_an_answer_from_behind_a_cursor_that_went_back_is_dropped(shard: Shard, line: Line) -> None:
    subscription, waiting = watch(shard, "a")
    await turns()
    line.answer({"a": ["1-0", "1-1"]})
    await waiting
    ahead = asyncio.create_task(subscription.next(EntryId(1, 1), 60))
    await turns()
    ahead.cancel()
    line.wakes_end_reads = False
    again = asyncio.create_task(subscription.next(START, 60))
    await turns()
    line.answer({"a": ["1-2"]})
    await turns()
    assert not again.done(), "1-0 and 1-1 are missing"
    assert line.reads[-1][0]["a"] == "0-0"
    line.answer({"a": ["1-0", "1-1", "1-2"]})
    assert [entry_id for entry_id, _ in await again] == [b"1-0", b"1-1", b"1-2"]


async def test_a_lost_connection_sends_everybody_to_look(shard: Shard, line: Line) -> None:
    _, waiting = watch(shard, "a")
    idle, taken = watch(shard, "b")
    await turns()
    line.answer({"b": ["1-0"]})
    assert len(await taken) == 1
    await turns()
    line.reads[-1][1].set_exception(ConnectionError("lost"))
    assert await waiting == []
    assert await idle.next(EntryId(1, 0), 60) == [], "also who was not waiting then"
    assert not shard._task.done()


async def test_a_batch_that_nobody_took_is_kept_and_not_read_again(shard: Shard, line: Line) -> None:
    subscription, waiting = watch(shard, "a")
    watch(shard, "b")
    await turns()
    waiting.cancel()
    line.answer({"a": ["1-0"]})
    await turns()
    assert line.keys == {"b"}
    assert len(await subscription.next(START, 60)) == 1


async def test_a_batch_that_was_kept_is_not_for_another_cursor(shard: Shard, line: Line) -> None:
    subscription, waiting = watch(shard, "a")
    await turns()
    line.answer({"a": ["1-0"]})
    assert len(await waiting) == 1
    await turns()
    line.answer({"a": ["1-1"]})
    await turns()
    again = asyncio.create_task(subscription.next(START, 60))
    await turns()
    line.answer({"a": ["1-0", "1-1"]})
    assert len(await again) == 2


async def test_a_wait_that_is_over_answers_nothing(shard: Shard) -> None:
    subscription = Subscription(shard, "a", START)
    shard.add(subscription)
    assert await subscription.next(START, 0.01) == []
