"""One connection for all the streams of a process: whoever comes and goes, nobody waits for another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ResponseError
from support.reading import (
    blocked_readers,
    connections,
    generate,
    kinds,
    line_of,
    multiplexer_of,
    read,
    tokens,
    until_blocked,
)
from support.restarts import restartable_server
from support.servers import valkey
from support.waiting import wait_until
from support.wire import Wire, following

from inferq.producer import EventStream, InferenceClient, JobLost, connect
from inferq.producer.multiplexer import Multiplexer
from inferq.producer.position import EntryId
from inferq.producer.shard import _ENTRIES_PER_KEY
from inferq.worker.commands import Claimed

pytestmark = pytest.mark.usefixtures("served")

#: Looks of a client, its wakes, and what tests ask with: what may be connected besides the one that reads.
OTHERS = 4 + 1 + 2


@pytest.fixture
async def multiplexer(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Multiplexer]:
    monkeypatch.setattr("inferq.producer.shard.BLOCK_MS", 600_000)
    async with connect(redis_url) as client:
        multiplexer = Multiplexer(client, "inferq")
        yield multiplexer
        await multiplexer.settled()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch, producer: InferenceClient) -> None:
    """A read that nobody wakes stays blocked until the test's own time is over."""
    monkeypatch.setattr("inferq.producer.shard.BLOCK_MS", 600_000)
    producer._source.block_ms = 600_000


async def claimed(wire: Wire, number: int) -> list[Claimed]:
    for index in range(number):
        await wire.enqueue(f"r{index}")
    jobs: list[Claimed] = []
    while len(jobs) < number:  # one call takes a part of so many
        jobs += await wire.claim(slots=number)
    return sorted(jobs, key=lambda job: int(job.request_id[1:]))


async def xreads(client: redis.asyncio.Redis) -> int:
    return (await client.info("commandstats"))["cmdstat_xread"]["calls"]


async def test_300_streams_need_one_connection(producer: InferenceClient, wire: Wire) -> None:
    jobs, steps = await claimed(wire, 300), 20
    readers = [asyncio.create_task(read(producer.stream(job.request_id))) for job in jobs]
    await until_blocked(wire.redis)
    await wait_until(lambda: all(len(shard._issued or ()) == 300 for shard in multiplexer_of(producer)._shards))
    before = await xreads(wire.redis)
    for number in range(1, steps + 1):
        await wire.publish(*(following(job, number) for job in jobs))
        assert len(await blocked_readers(wire.redis)) <= 1
        assert len(await connections(wire.redis)) <= 1 + OTHERS
    during = await xreads(wire.redis) - before
    for job in jobs:
        await wire.worker.finish(following(job, steps + 1, kind="finished"))
    for events in await asyncio.gather(*readers):
        assert tokens(events) == list(range(1, steps + 1))
        assert kinds(events)[-1] == "finished"
    assert during <= 6 * steps, f"{during} reads for {steps} steps of 300 streams: work grows with the streams"


async def test_a_stream_that_opens_is_read_at_once(producer: InferenceClient, wire: Wire, endless: None) -> None:
    """The read that is blocked on the others must not be waited for."""
    jobs = await claimed(wire, 200)
    readers = []
    async with asyncio.timeout(60):
        for job in jobs:
            readers.append(asyncio.create_task(read(producer.stream(job.request_id))))
            for _ in range(random.Random(job.request_id).randrange(12)):
                await asyncio.sleep(0)
        await until_blocked(wire.redis)
        await wire.publish(*(following(job, 1) for job in jobs))
        for job in jobs:
            await wire.worker.finish(following(job, 2, kind="finished"))
        assert all(tokens(events) == [1] for events in await asyncio.gather(*readers))


class Crowd:
    """Readers of some jobs that come and go at random, each from where it was."""

    def __init__(self, producer: InferenceClient, wire: Wire, jobs: list[Claimed], seed: int) -> None:
        self._producer, self._wire, self._jobs = producer, wire, jobs
        self._random = random.Random(seed)
        self._published = dict.fromkeys((job.request_id for job in jobs), 0)
        self._readers: list[tuple[EventStream, asyncio.Task[None], list[Any]]] = []
        self.left: list[tuple[str, str, list[Any]]] = []  #: id, position and events of readers that have gone

    async def step(self) -> None:
        await self._random.choice([self._open, self._open, self._close, self._publish, self._publish])()

    async def cut(self) -> None:
        """One of the client's connections is lost, at some moment of what it is used for."""
        for _ in range(self._random.randrange(30)):
            await asyncio.sleep(0)
        if found := await connections(self._wire.redis):
            await self._wire.redis.client_kill_filter(_id=self._random.choice(found)["id"])

    async def _open(self) -> None:
        request_id, position, events = self._random.choice(self._jobs).request_id, "0", []
        if self.left and self._random.random() < 0.5:
            request_id, position, events = self.left.pop(self._random.randrange(len(self.left)))
        stream = self._producer.stream(request_id, position)

        async def follow() -> None:
            async for event in stream:
                events.append(event)

        self._readers.append((stream, asyncio.create_task(follow()), events))

    async def _close(self) -> None:
        if not self._readers:
            return
        stream, task, events = self._readers.pop(self._random.randrange(len(self._readers)))
        if self._random.random() < 0.5:
            await stream.aclose()
            await task
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        self.left.append((stream.request_id, stream.position, events))

    async def _publish(self) -> None:
        chosen = self._random.sample(self._jobs, self._random.randint(1, len(self._jobs)))
        for job in chosen:
            self._published[job.request_id] += 1
        await self._wire.publish(*(following(job, self._published[job.request_id]) for job in chosen))

    async def end(self) -> None:
        """Everybody comes back, and the jobs end: each reader has each token once."""
        while self.left:
            await self._open()
        for job in self._jobs:
            last = following(job, self._published[job.request_id] + 1, kind="finished")
            await self._wire.worker.finish(last)
        for stream, task, events in self._readers:
            await task
            assert tokens(events) == list(range(1, self._published[stream.request_id] + 1))
            assert kinds(events).count("finished") == 1


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
async def test_readers_that_come_and_go(producer: InferenceClient, wire: Wire, endless: None, seed: int) -> None:
    crowd = Crowd(producer, wire, await claimed(wire, 12), seed)
    async with asyncio.timeout(100):
        for _ in range(250):
            await crowd.step()
            assert len(await blocked_readers(wire.redis)) <= 1
        await crowd.end()
    await wait_until(lambda: _is_quiet(producer, wire.redis))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
async def test_readers_that_come_and_go_while_connections_are_lost(
    producer: InferenceClient, wire: Wire, endless: None, seed: int
) -> None:
    crowd = Crowd(producer, wire, await claimed(wire, 40), seed)
    async with asyncio.timeout(100):
        for _ in range(150):
            await crowd.step()
            await crowd.cut()
        await crowd.end()
    await wait_until(lambda: _is_quiet(producer, wire.redis))


async def _is_quiet(producer: InferenceClient, client: redis.asyncio.Redis) -> bool:
    pool = line_of(producer).connection_pool
    idle = [each for each in pool._available_connections if each.is_connected]
    return not idle and not pool._in_use_connections and not await blocked_readers(client)


async def test_a_slow_consumer_holds_up_nobody(producer: InferenceClient, wire: Wire) -> None:
    slow_job, quick_job = await claimed(wire, 2)
    slow, quick = producer.stream(slow_job.request_id), producer.stream(quick_job.request_id)
    for stream in (slow, quick):
        assert kinds([await anext(stream), await anext(stream)]) == ["queued", "started"]
    first = asyncio.create_task(anext(slow))
    await until_blocked(wire.redis)
    for begin in range(1, 2001, 100):
        await wire.publish(*(following(slow_job, number) for number in range(begin, begin + 100)))
    await generate(wire, quick_job)
    assert tokens(await read(quick)) == [1, 2, 3, 4]
    kept = slow._hold().subscription._batch
    assert kept is not None and len(kept) <= _ENTRIES_PER_KEY
    await wire.enqueue("other")
    other = asyncio.create_task(read(producer.stream("other")))
    await until_blocked(wire.redis)
    (shard,) = multiplexer_of(producer)._shards
    assert list(shard._issued) == [wire.keys.events("other")], "what nobody takes is read on"
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    await wire.worker.finish(following(slow_job, 2001, kind="finished"))
    assert tokens([await first, *await read(slow)]) == list(range(1, 2001))


async def test_one_answer_holds_a_part_of_each(multiplexer: Multiplexer, wire: Wire) -> None:
    """However much a stream holds, what it gets of an answer is bounded, and another stream is in the same one."""
    full, other = await claimed(wire, 2)
    for begin in range(1, 1001, 100):
        await wire.publish(*(following(full, number) for number in range(begin, begin + 100)))
    first = multiplexer.subscribe(wire.keys.events(full.request_id))
    second = multiplexer.subscribe(wire.keys.events(other.request_id))
    start = EntryId(0, 0)
    assert len(await second.next(start, 30)) == 2
    batch = await first.next(start, 30)
    assert len(batch) == _ENTRIES_PER_KEY
    rest = await first.next(EntryId.parse(batch[-1][0]), 30)
    assert EntryId.parse(rest[0][0]).number == EntryId.parse(batch[-1][0]).number + 1
    assert len(await first.next(start, 30)) == _ENTRIES_PER_KEY, "a cursor that goes back begins anew"
    first.close()
    second.close()


async def test_readers_at_different_places_of_one_stream(multiplexer: Multiplexer, wire: Wire) -> None:
    (job,) = await claimed(wire, 1)
    await generate(wire, job, end=False)
    key = wire.keys.events(job.request_id)
    whole, rest, waiting = multiplexer.subscribe(key), multiplexer.subscribe(key), multiplexer.subscribe(key)
    middle, end = EntryId(job.epoch, 2), EntryId(job.epoch, 4)
    last = asyncio.create_task(waiting.next(end, 30))
    found = await asyncio.gather(whole.next(EntryId(0, 0), 30), rest.next(middle, 30))
    assert [len(batch) for batch in found] == [6, 2]
    await generate(wire, job, first=5, last=5, end=False)
    assert [entry_id for entry_id, _ in await last] == [f"{job.epoch}-5".encode()]
    for subscription in (whole, rest, waiting):
        subscription.close()


async def test_a_key_that_is_no_stream_fails_its_own_reader(multiplexer: Multiplexer, wire: Wire) -> None:
    good, bad = await claimed(wire, 2)
    reading = multiplexer.subscribe(wire.keys.events(good.request_id))
    broken = multiplexer.subscribe(wire.keys.events(bad.request_id))
    start = EntryId(good.epoch, 0)
    await wire.redis.set(wire.keys.events(bad.request_id), "text", px=60_000)
    failing, waiting = asyncio.create_task(broken.next(start, 30)), asyncio.create_task(reading.next(start, 30))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await failing
    await wire.publish(following(good))
    assert len(await waiting) == 1
    broken.close()
    reading.close()


async def test_many_keys_are_shared_out(producer: InferenceClient, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferq.producer.multiplexer.KEYS_PER_CONNECTION", 10)
    jobs = await claimed(wire, 25)
    readers = [asyncio.create_task(read(producer.stream(job.request_id))) for job in jobs for _ in range(2)]
    await until_blocked(wire.redis, number=3)
    assert multiplexer_of(producer).num_connections == 3
    for job in jobs:
        await generate(wire, job, last=2)
    assert all(tokens(events) == [1, 2] for events in await asyncio.gather(*readers))
    await wait_until(lambda: _is_quiet(producer, wire.redis))


async def test_clients_of_one_pool_share_the_connection(redis_url: str, wire: Wire) -> None:
    jobs = await claimed(wire, 5)
    async with connect(redis_url) as pool:
        clients = [InferenceClient(pool, model="tiny") for _ in jobs]
        readers = [asyncio.create_task(read(c.stream(j.request_id))) for c, j in zip(clients, jobs, strict=True)]
        await until_blocked(wire.redis)
        await clients[0].aclose()
        ended, *others = await asyncio.gather(readers[0], *clients_go_on(wire, jobs, readers), return_exceptions=True)
        assert "closed" in str(ended)
        assert all(tokens(events) == [1, 2, 3, 4] for events in others)
        for each in clients[1:]:
            await each.aclose()


def clients_go_on(wire: Wire, jobs: list[Claimed], readers: list[asyncio.Task[Any]]) -> list[Any]:
    async def after(job: Claimed, reader: asyncio.Task[Any]) -> Any:
        await generate(wire, job)
        return await reader

    return [after(job, reader) for job, reader in zip(jobs[1:], readers[1:], strict=True)]


async def test_closing_the_last_stream_closes_the_connection(producer: InferenceClient, wire: Wire) -> None:
    for job in await claimed(wire, 3):
        async with producer.stream(job.request_id) as stream:
            await anext(stream)
            await anext(stream)
            waiting = asyncio.create_task(anext(stream))
            await until_blocked(wire.redis)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await multiplexer_of(producer).settled()
        assert await _is_quiet(producer, wire.redis)


async def test_a_lost_connection_is_a_pause_for_all(producer: InferenceClient, wire: Wire, endless: None) -> None:
    jobs = await claimed(wire, 50)
    readers = [asyncio.create_task(read(producer.stream(job.request_id))) for job in jobs]
    async with asyncio.timeout(60):
        for number in range(1, 4):
            (each,) = await wait_until(lambda: blocked_readers(wire.redis))
            await wire.redis.client_kill_filter(_id=each["id"])
            await wire.publish(*(following(job, number) for job in jobs))
        for job in jobs:
            await wire.worker.finish(following(job, 4, kind="finished"))
        assert all(tokens(events) == [1, 2, 3] for events in await asyncio.gather(*readers))


async def test_after_a_lost_connection_a_stream_is_looked_at(
    producer: InferenceClient, wire: Wire, endless: None
) -> None:
    """What comes after it may be another server, which lacks what was read: no entry would ever tell."""
    job = await wire.claimed("a")
    reader = asyncio.create_task(read(producer.stream("a")))
    (each,) = await wait_until(lambda: blocked_readers(wire.redis))
    await wire.redis.delete(wire.keys.events(job.request_id))
    assert not reader.done()
    await wire.redis.client_kill_filter(_id=each["id"])
    async with asyncio.timeout(30):
        with pytest.raises(JobLost):
            await reader


async def test_a_server_that_restarts_is_a_pause_for_all() -> None:
    with restartable_server() as server:
        async with connect(server.url) as direct:
            wire = Wire(direct)
            jobs = await claimed(wire, 20)
            async with InferenceClient.from_url(server.url, model="tiny") as producer:
                readers = [asyncio.create_task(read(producer.stream(job.request_id))) for job in jobs]
                await until_blocked(direct)
                await wire.publish(*(following(job, 1) for job in jobs))
                server.kill()
                server.start()
                await until_blocked(direct)
                for job in jobs:
                    await generate(wire, job, first=2)
                assert all(tokens(events) == [1, 2, 3, 4] for events in await asyncio.gather(*readers))


async def test_a_user_who_may_write_nothing_still_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to wake the read by an entry, its connection is given up and made anew."""
    monkeypatch.setattr("inferq.producer.shard.BLOCK_MS", 600_000)
    with valkey() as url:
        async with connect(url) as admin:
            rules = {"enabled": True, "passwords": ["+s"], "categories": ["+@all"], "keys": ["*"]}
            await admin.acl_setuser("reader", **rules, commands=["-xadd"])
            wire = Wire(admin)
            jobs = await claimed(wire, 5)
            path = url.removeprefix("unix://")
            async with (
                InferenceClient.from_url(f"unix://reader:s@{path}", model="tiny") as producer,
                asyncio.timeout(30),
            ):
                producer._source.block_ms = 600_000
                readers = []
                for job in jobs:
                    readers.append(asyncio.create_task(read(producer.stream(job.request_id))))
                    await until_blocked(admin)
                for job, reader in reversed(list(zip(jobs, readers, strict=True))):  # nothing else ends the read
                    await generate(wire, job, last=1)
                    assert tokens(await reader) == [1]
