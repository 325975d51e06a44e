"""Reading streams from a real server, with entries written as a worker writes them."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from support.reading import blocked_readers, generate, kinds, line_of, multiplexer_of, read, tokens, until_blocked
from support.servers import valkey
from support.waiting import wait_until
from support.wire import Wire, following

from inferq.producer import (
    EngineFailure,
    InferenceClient,
    InvalidRequest,
    JobLost,
    RedisUnavailable,
    RequestReplaced,
    UnknownRequest,
    connect,
)
from inferq.producer.contract import Keys
from inferq.producer.multiplexer import Multiplexer

pytestmark = pytest.mark.usefixtures("served")


def hurried(producer: InferenceClient, **changes: Any) -> InferenceClient:
    """The same client with other patience, so that a test need not wait a lease length."""
    producer._source = replace(producer._source, **changes)
    return producer


ALL = ["queued", "started", "delta", "delta", "delta", "delta", "finished"]


async def test_two_readers_and_a_late_one_get_all_of_it(producer: InferenceClient, wire: Wire) -> None:
    await wire.enqueue("a")
    readers = [asyncio.create_task(read(producer.stream("a"))) for _ in range(2)]
    await until_blocked(wire.redis)
    (job,) = await wire.claim()
    await generate(wire, job)
    one, two = await asyncio.gather(*readers)
    late = await read(producer.stream("a"))
    assert one == two == late
    assert kinds(one) == ALL


async def test_a_reader_that_comes_in_the_middle_gets_the_beginning_too(producer: InferenceClient, wire: Wire) -> None:
    job = await wire.claimed("a")
    await generate(wire, job, last=3, end=False)
    reader = asyncio.create_task(read(producer.stream("a")))
    await until_blocked(wire.redis)
    await generate(wire, job, first=4)
    assert kinds(await reader) == ALL


async def test_every_position_goes_on_with_the_rest(producer: InferenceClient, wire: Wire) -> None:
    await generate(wire, await wire.claimed("a"))
    events, positions = [], []
    async with producer.stream("a") as stream:
        assert stream.position == "0"
        async for event in stream:
            events.append(event)
            positions.append(stream.position)
    for number, position in enumerate(positions, start=1):
        assert await read(producer.stream("a", position)) == events[number:]
        assert await read(producer.stream("a", position.partition(":")[0])) == events[number:]
    assert await read(producer.stream("a", "0")) == events


async def test_an_iterator_that_ended_stays_ended(producer: InferenceClient, wire: Wire) -> None:
    await generate(wire, await wire.claimed("a"))
    stream = producer.stream("a")
    assert len(await read(stream)) == len(ALL)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_100_entries_read_one_by_one(producer: InferenceClient, wire: Wire, monkeypatch: Any) -> None:
    monkeypatch.setattr("inferq.producer.stream._ENTRIES_PER_READ", 1)
    job = await wire.claimed("a")
    await wire.publish(*(following(job, number) for number in range(1, 101)))
    await wire.worker.finish(following(job, 101, kind="finished"))
    assert tokens(await read(producer.stream("a"))) == list(range(1, 101))


async def test_unknown_ids_are_told_at_once(producer: InferenceClient, wire: Wire) -> None:
    async with asyncio.timeout(3):
        for position in ("0", "5-1", "5-1:1.1"):
            with pytest.raises(UnknownRequest):
                await anext(producer.stream("nobody", position))


async def test_after_an_error_the_iterator_has_ended(producer: InferenceClient) -> None:
    stream = producer.stream("nobody")
    with pytest.raises(UnknownRequest):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize(("request_id", "position"), [("a b", "0"), ("", "0"), ("a", "$"), ("a", ""), ("a", "1-")])
async def test_what_cannot_be_read_is_refused(producer: InferenceClient, request_id: str, position: str) -> None:
    with pytest.raises(InvalidRequest):
        producer.stream(request_id, position)


async def test_a_stream_that_goes_ends_its_reader(producer: InferenceClient, wire: Wire) -> None:
    hurried(producer, block_ms=50)
    job = await wire.claimed("a")
    await generate(wire, job, last=2, end=False)
    stream = producer.stream("a")
    events = [await anext(stream) for _ in range(4)]
    assert tokens(events) == [1, 2]
    await wire.redis.delete(wire.keys.events("a"))
    with pytest.raises(JobLost):
        await anext(stream)


async def test_another_job_under_the_id_ends_its_reader(producer: InferenceClient, wire: Wire) -> None:
    job = await wire.claimed("a")
    await generate(wire, job, end=False)
    stream = producer.stream("a")
    events = [await anext(stream) for _ in range(6)]
    reader = asyncio.create_task(anext(stream))
    await until_blocked(wire.redis)
    await wire.worker.finish(following(job, 5, kind="failed"))
    assert (await reader).type == "failed"
    resumed = producer.stream("a", stream.position)
    behind = producer.stream("a")
    assert [await anext(behind) for _ in range(6)] == events
    await wire.enqueue("a")
    with pytest.raises(RequestReplaced):
        await anext(resumed)
    behind._items = iter(())  # what it had already fetched
    with pytest.raises(RequestReplaced):
        await anext(behind)
    assert kinds([await anext(producer.stream("a"))]) == ["queued"]


async def test_the_first_token_may_take_longer_than_the_socket_timeout(redis_url: str, wire: Wire) -> None:
    async with connect(redis_url, socket_timeout=0.3) as client, InferenceClient(client, model="tiny") as producer:
        job = await wire.claimed("a")
        reader = asyncio.create_task(read(producer.stream("a")))
        await until_blocked(wire.redis, idle_s=2)
        await generate(wire, job)
        assert kinds(await reader) == ALL


async def test_reads_that_are_over_do_not_hurry_the_reader(producer: InferenceClient, wire: Wire) -> None:
    hurried(producer, block_ms=20)
    job = await wire.claimed("a")
    stream = producer.stream("a")
    reader = asyncio.create_task(read(stream))
    calls = (await wire.redis.info("commandstats"))["cmdstat_xread"]["calls"]

    async def several_reads_were_over() -> bool:
        return (await wire.redis.info("commandstats"))["cmdstat_xread"]["calls"] > calls + 5

    await wait_until(several_reads_were_over)
    await generate(wire, job)
    assert kinds(await reader) == ALL


async def test_1000_cancelled_reads_never_mix_replies(redis_url: str, wire: Wire) -> None:
    """Two streams on one connection for commands, one for reads and one to wake them; each read that is cut short must
    leave nothing for the next one."""
    async with connect(redis_url, max_connections=1) as client, InferenceClient(client, model="tiny") as producer:
        line_of(producer).connection_pool.max_connections = 2
        waiting, other = await wire.claimed("waiting"), await wire.claimed("other")
        await generate(wire, other)
        stream = producer.stream("waiting")
        started = [await anext(stream), await anext(stream)]
        for number in range(1000):
            task = asyncio.create_task(anext(stream))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if number % 50 == 0:
                assert tokens(await read(producer.stream("other"))) == [1, 2, 3, 4]
                assert (await producer.status("waiting")).worker == "worker-1"
        await generate(wire, waiting, last=3)
        rest = await read(stream)
        assert kinds(started + rest) == ["queued", "started", "delta", "delta", "delta", "finished"]
        assert tokens(rest) == [1, 2, 3]


async def test_a_cancelled_read_loses_no_event(producer: InferenceClient, wire: Wire) -> None:
    job = await wire.claimed("a")
    stream = producer.stream("a")
    events = [await anext(stream), await anext(stream)]
    for number in range(1, 6):
        reader = asyncio.create_task(anext(stream))
        await until_blocked(wire.redis)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await generate(wire, job, first=number, last=number, end=False)
        events.append(await anext(stream))
    assert tokens(events) == [1, 2, 3, 4, 5]


async def test_a_dropped_connection_is_made_again(producer: InferenceClient, wire: Wire) -> None:
    job = await wire.claimed("a")
    reader = asyncio.create_task(read(producer.stream("a")))
    for number in range(1, 4):
        (each,) = await wait_until(lambda: blocked_readers(wire.redis))
        await wire.redis.client_kill_filter(_id=each["id"])
        await generate(wire, job, first=number, last=number, end=False)
    await generate(wire, job, first=4)
    assert kinds(await reader) == ALL


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    with valkey("--appendonly", "yes") as url:
        yield url, Path(url.removeprefix("unix://"))


@asynccontextmanager
async def proxy(upstream: Path, path: Path) -> AsyncIterator[dict[str, Any]]:
    """Stands before a server; with `silent` set it keeps connections and passes nothing on."""
    state: dict[str, Any] = {"silent": False, "connections": 0}

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if not state["silent"]:
                target.write(data)
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state["connections"] += 1
        up_reader, up_writer = await asyncio.open_unix_connection(str(upstream))
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer), return_exceptions=True)

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield state
    finally:
        server.close()
        await server.wait_closed()


async def test_a_half_open_connection_is_noticed(own_server: tuple[str, Path], tmp_path: Path) -> None:
    """Nothing says that the other end has gone: only an answer that does not come does."""
    url, upstream = own_server
    async with redis.asyncio.Redis.from_url(url) as direct, proxy(upstream, tmp_path / "p.sock") as state:
        wire = Wire(direct)
        job = await wire.claimed("a")
        async with InferenceClient.from_url(f"unix://{tmp_path / 'p.sock'}", model="tiny") as producer:
            hurried(producer, block_ms=100, answer_s=0.3)
            reader = asyncio.create_task(read(producer.stream("a")))
            await until_blocked(direct)
            state["silent"] = True
            await generate(wire, job)
            connections = state["connections"]
            await wait_until(lambda: state["connections"] > connections, what="the reader gives the connection up")
            assert not reader.done()
            state["silent"] = False
            assert kinds(await reader) == ALL


async def test_a_server_that_is_away_for_too_long_is_given_up(own_server: tuple[str, Path], tmp_path: Path) -> None:
    url, upstream = own_server
    async with redis.asyncio.Redis.from_url(url) as direct:
        await Wire(direct).claimed("a")
    path = tmp_path / "p.sock"
    async with InferenceClient.from_url(f"unix://{path}", model="tiny") as producer:
        hurried(producer, block_ms=100, patience_s=0.2)
        stream = producer.stream("a")
        async with proxy(upstream, path):
            assert kinds([await anext(stream) for _ in range(2)]) == ["queued", "started"]
            await cut(producer)
        with pytest.raises(RedisUnavailable, match="cannot be reached"):
            await anext(stream)


async def cut(producer: InferenceClient) -> None:
    """Close the idle connections, as a server does that goes away."""
    await line_of(producer).connection_pool.disconnect()
    await producer._source.redis.connection_pool.disconnect()


async def test_a_deadline_that_has_passed_is_looked_at_at_once(producer: InferenceClient, wire: Wire) -> None:
    await producer.submit("x", request_id="a", deadline_ms=1)

    async def has_passed() -> bool:
        seconds, micros = await producer._source.redis.time()
        expires_at_ms = await producer._source.redis.hget("inferq:a:job", "expires_at_ms")
        return seconds * 1000 + micros / 1000 > float(expires_at_ms)

    await wait_until(has_passed)
    # Within the block time of a read nothing else would make the reader look.
    async with asyncio.timeout(producer._source.block_ms / 1000 / 2):
        events = [event async for event in producer.stream("a")]
    assert events[-1].finish_reasons == ("deadline",)


async def test_a_job_nobody_runs_is_ended_at_its_deadline(producer: InferenceClient) -> None:
    """No worker is there: the reader itself sees to it, well before a lease length is over."""
    async with asyncio.timeout(4):
        await producer.submit("x", request_id="a", deadline_ms=150)
        events = await read(producer.stream("a"))
    assert kinds(events) == ["queued", "finished"]
    assert events[-1].finish_reasons == ("deadline",)


async def test_a_cancelled_job_whose_owner_died_is_ended_by_its_reader(producer: InferenceClient, wire: Wire) -> None:
    hurried(producer, block_ms=50)
    job = await wire.claimed("a")
    await generate(wire, job, last=2, end=False)
    reader = asyncio.create_task(read(producer.stream("a")))
    await until_blocked(wire.redis)
    await producer.cancel("a")
    await wire.lapse("a")
    events = await reader
    assert events[-1].finish_reasons == ("cancelled",)
    assert tokens(events) == [1, 2]


async def test_a_plain_arq_job_is_waited_for(producer: InferenceClient, wire: Wire) -> None:
    """It has no stream before a worker takes it."""
    hurried(producer, block_ms=50)
    await wire.enqueue_plain("a")
    reader = asyncio.create_task(read(producer.stream("a")))
    await until_blocked(wire.redis)
    (job,) = await wire.claim()
    await generate(wire, job)
    assert kinds(await reader) == ALL


async def test_a_plain_arq_job_that_goes_before_it_is_taken_is_lost(producer: InferenceClient, wire: Wire) -> None:
    hurried(producer, block_ms=50)
    await wire.enqueue_plain("a")
    reader = asyncio.create_task(read(producer.stream("a")))
    await until_blocked(wire.redis)
    await wire.redis.delete(wire.keys.payload("a"))
    with pytest.raises(JobLost):
        await reader


async def test_streams_that_nobody_goes_on_with_hold_no_connection(redis_url: str, wire: Wire) -> None:
    await wire.claimed("a")
    producer = InferenceClient.from_url(redis_url, model="tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(20):
            async for event in producer.stream("a"):
                assert event.type == "queued"
                break
        assert not line_of(producer).connection_pool._available_connections
        stream = producer.stream("a")
        waiting = asyncio.create_task(read(stream))
        await until_blocked(wire.redis)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(await blocked_readers(wire.redis)) == 1, "an open stream is read one batch ahead"
        del waiting, stream
        gc.collect()
        multiplexer = multiplexer_of(producer)
        await wait_until(partial(_nobody_reads, multiplexer))
        await multiplexer.settled()
        assert not await blocked_readers(wire.redis)
        await producer.aclose()
        del producer, multiplexer
        gc.collect()


def _nobody_reads(multiplexer: Multiplexer) -> bool:
    return multiplexer.num_connections == 0


@pytest.mark.parametrize("turns", range(1, 12))
async def test_a_stream_that_is_closed_while_it_looks_ends(producer: InferenceClient, wire: Wire, turns: int) -> None:
    """At whatever moment: it must not begin to wait after that."""
    hurried(producer, block_ms=600_000)
    await wire.enqueue("a")
    stream = producer.stream("a")
    reader = asyncio.create_task(read(stream))
    for _ in range(turns):
        await asyncio.sleep(0.0005)
    await stream.aclose()
    async with asyncio.timeout(20):
        assert kinds(await reader) in ([], ["queued"])
    assert multiplexer_of(producer).num_connections == 0


async def test_a_stream_that_is_closed_while_the_server_is_away_ends() -> None:
    async with InferenceClient.from_url("unix:///nowhere/at/all.sock", model="tiny") as producer:
        hurried(producer, patience_s=float("inf"))
        stream = producer.stream("a")
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        async with asyncio.timeout(20):
            assert await reader == []


async def test_a_cancellation_is_never_lost(producer: InferenceClient, wire: Wire) -> None:
    """At whatever moment it comes; redis-py alone loses one that comes just before it looks at its connection."""
    hurried(producer, block_ms=600_000)
    await wire.enqueue("a")
    for turns in range(60):
        for work in (read(producer.stream("a")), producer.status("a"), producer.result("a")):
            task = asyncio.create_task(work)
            for _ in range(turns):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=20)
            assert done and (was_done or task.cancelled()), f"lost after {turns} turns of the loop"


async def test_closing_the_client_ends_its_streams(producer: InferenceClient, wire: Wire) -> None:
    await wire.claimed("a")
    reader = asyncio.create_task(read(producer.stream("a")))
    await until_blocked(wire.redis)
    await producer.aclose()
    with pytest.raises(RedisUnavailable, match="closed"):
        await reader
    assert not await blocked_readers(wire.redis)


async def test_a_closed_stream_yields_no_more(producer: InferenceClient, wire: Wire) -> None:
    await generate(wire, await wire.claimed("a"))
    async with producer.stream("a") as stream:
        await anext(stream)
        position = stream.position
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert stream.position == position
    assert kinds(await read(producer.stream("a", position))) == ALL[1:]


async def test_a_move_to_another_server_is_a_pause(own_server: tuple[str, Path], tmp_path: Path) -> None:
    """What a restart or a failover is to a reader: its connections are gone, and then the stream goes on elsewhere."""
    url, upstream = own_server
    with valkey() as other:
        async with redis.asyncio.Redis.from_url(url) as direct, redis.asyncio.Redis.from_url(other) as second:
            wire, moved = Wire(direct), Wire(second)
            job = await wire.claimed("a")
            await generate(wire, job, last=2, end=False)
            path = tmp_path / "p.sock"
            async with InferenceClient.from_url(f"unix://{path}", model="tiny") as producer:
                hurried(producer, block_ms=100, answer_s=0.3)
                async with proxy(upstream, path):
                    stream = producer.stream("a")
                    events = [await anext(stream) for _ in range(4)]
                    for key in await direct.keys():
                        await second.restore(key, 60_000, await direct.dump(key), replace=True)
                    await cut(producer)
                path.unlink(missing_ok=True)
                rest = asyncio.create_task(read(stream))
                await generate(moved, job, first=3)
                async with proxy(Path(other.removeprefix("unix://")), path):
                    events += await rest
    assert kinds(events) == ALL


async def test_results_add_up(producer: InferenceClient, wire: Wire) -> None:
    await generate(wire, await wire.claimed("a"))
    result = await producer.result("a")
    assert (result.request_id, result.text, result.token_ids) == ("a", "xxxx", (1, 2, 3, 4))
    assert result.finish_reasons == ("stop",) == (result.finish_reason,)


async def test_a_result_that_does_not_come_in_time(producer: InferenceClient, wire: Wire) -> None:
    job = await wire.claimed("a")
    with pytest.raises(TimeoutError):
        await producer.result("a", timeout=0.1)
    await generate(wire, job)
    assert (await producer.result("a", timeout=30)).text == "xxxx"


async def test_a_failed_request_raises_what_failed_names(producer: InferenceClient, wire: Wire) -> None:
    job = await wire.claimed("a")
    await generate(wire, job, end=False)
    await wire.worker.finish(following(job, 5, kind="failed"))
    with pytest.raises(EngineFailure, match="internal: a test") as caught:
        await producer.result("a")
    assert caught.value.request_id == "a"


def test_keys_of_requests_say_nothing_of_a_model() -> None:
    one, two = Keys("one"), Keys("two")
    assert one.events("a") == two.events("a")
    assert one.job("a") == two.job("a")
