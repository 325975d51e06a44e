"""Requests that end when nobody reads them any more, and requests that wait for a worker that is not there."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.reading import generate, kinds, read, until_blocked
from support.waiting import wait_until
from support.wire import Wire

from inferq.producer import InferenceClient, NoWorker
from inferq.producer.contract import READER_TTL_MS
from inferq.producer.presence import _PERIOD_S, Presence


async def has_reader(wire: Wire, request_id: str) -> bool:
    return bool(await wire.redis.exists(wire.keys.reader(request_id)))


@pytest.mark.usefixtures("served")
class TestPresence:
    async def test_a_reader_says_that_it_is_there(self, producer: InferenceClient, wire: Wire) -> None:
        await producer.submit("x", request_id="a", cancel_on_disconnect=True)
        assert not await has_reader(wire, "a"), "nobody has read it yet"
        async with producer.stream("a") as stream:
            await anext(stream)
            assert await has_reader(wire, "a")
            assert 0 < await wire.redis.pttl(wire.keys.reader("a")) <= READER_TTL_MS

    async def test_other_requests_know_no_reader(self, producer: InferenceClient, wire: Wire) -> None:
        await producer.submit("x", request_id="a")
        async with producer.stream("a") as stream:
            await anext(stream)
            assert not await has_reader(wire, "a")
            assert not producer._source.presence._readers

    async def test_it_says_so_as_long_as_one_stream_is_open(self, producer: InferenceClient, wire: Wire) -> None:
        """Also when its consumer is slow and asks for nothing."""
        presence = producer._source.presence = Presence(producer._source.commands, period_s=0.01)
        await producer.submit("x", request_id="a", cancel_on_disconnect=True)
        one, two = producer.stream("a"), producer.stream("a")
        await anext(one)
        await anext(two)
        for stream in (one, two):
            await wire.redis.delete(wire.keys.reader("a"))
            await wait_until(lambda: has_reader(wire, "a"), what="the presence is renewed")
            await stream.aclose()
        assert not presence._readers
        await wire.redis.delete(wire.keys.reader("a"))
        assert presence._task is None

    async def test_who_is_gone_is_noticed(self, producer: InferenceClient, wire: Wire) -> None:
        await producer.submit("x", request_id="a", cancel_on_disconnect=True)
        async with producer.stream("a") as stream:
            await anext(stream)
        await wire.reader_leaves("a")
        assert await wire.producer.expire() == ["a"]
        assert (await producer.result("a")).finish_reasons == ("cancelled",)

    async def test_a_result_that_is_waited_for_is_a_reader(self, producer: InferenceClient, wire: Wire) -> None:
        await producer.submit("x", request_id="a", cancel_on_disconnect=True)
        waiting = asyncio.create_task(producer.result("a"))
        await wait_until(lambda: has_reader(wire, "a"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not producer._source.presence._readers

    async def test_a_lost_server_ends_no_presence(self, producer: InferenceClient, wire: Wire) -> None:
        presence = producer._source.presence = Presence(producer._source.commands, period_s=0.01)
        await producer.submit("x", request_id="a", cancel_on_disconnect=True)
        async with producer.stream("a") as stream:
            await anext(stream)
            await producer._source.redis.connection_pool.disconnect()
            await wire.redis.delete(wire.keys.reader("a"))
            await wait_until(lambda: has_reader(wire, "a"))
            assert not presence._task.done()

    def test_two_renewals_may_fail(self) -> None:
        assert 3 * _PERIOD_S * 1000 <= READER_TTL_MS


class TestNoWorker:
    async def test_a_reader_is_told_once(self, producer: InferenceClient, wire: Wire) -> None:
        producer._source.block_ms = 20
        await wire.enqueue("a")
        stream = producer.stream("a")
        assert kinds([await anext(stream), await anext(stream)]) == ["queued", "no_worker"]
        position = stream.position
        rest = asyncio.create_task(read(stream))
        await until_blocked(wire.redis)
        (job,) = await wire.claim()
        await generate(wire, job)
        assert kinds(await rest) == ["started", "delta", "delta", "delta", "delta", "finished"]
        assert kinds(await read(producer.stream("a", position)))[0] == "started"

    async def test_it_names_the_model(self, producer: InferenceClient, wire: Wire) -> None:
        request_id = await producer.submit("x", model="another")
        stream = producer.stream(request_id)
        assert [await anext(stream), await anext(stream)][1] == NoWorker(model="another")

    @pytest.mark.usefixtures("served")
    async def test_nobody_is_told_while_a_worker_is_there(self, producer: InferenceClient, wire: Wire) -> None:
        producer._source.block_ms = 20
        await wire.enqueue("a")
        reader = asyncio.create_task(read(producer.stream("a")))
        calls = (await wire.redis.info("commandstats"))["cmdstat_xread"]["calls"] if reader.done() else 0

        async def has_looked_again() -> bool:
            stats = await wire.redis.info("commandstats")
            return stats.get("cmdstat_xread", {"calls": 0})["calls"] > calls + 10

        await wait_until(has_looked_again)
        (job,) = await wire.claim()
        await generate(wire, job)
        assert "no_worker" not in kinds(await reader)

    async def test_a_running_request_needs_no_other_worker(self, producer: InferenceClient, wire: Wire) -> None:
        await generate(wire, await wire.claimed("a"))
        assert "no_worker" not in kinds(await read(producer.stream("a")))

    async def test_it_is_told_again_after_the_only_worker_died(self, producer: InferenceClient, wire: Wire) -> None:
        producer._source.block_ms = 20
        await wire.enqueue("a")
        stream = producer.stream("a")
        events = [await anext(stream), await anext(stream)]
        await wire.claim()
        events.append(await anext(stream))
        await wire.lapse("a")
        events.append(await anext(stream))
        assert kinds(events) == ["queued", "no_worker", "started", "no_worker"]

    def test_it_is_no_entry_of_the_wire(self) -> None:
        from inferq.producer import decode_event
        from inferq.producer.events import EVENT_TYPES

        assert "no_worker" not in EVENT_TYPES
        assert decode_event({b"t": b"no_worker", b"d": json.dumps({"model": "tiny"}).encode()}) is None
