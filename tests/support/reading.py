"""What readers are seen to do: their events, and their connections as the server lists them."""

from __future__ import annotations

import redis.asyncio

from inferq.producer import Delta, Event, EventStream, InferenceClient
from inferq.producer.multiplexer import Multiplexer, shared_multiplexer
from inferq.worker.commands import Claimed, Outcome

from .waiting import wait_until
from .wire import Wire, following


async def generate(wire: Wire, job: Claimed, *, first: int = 1, last: int = 4, end: bool = True) -> None:
    """The owner's deltas, one token of one character each, and the terminal event."""
    for number in range(first, last + 1):
        assert await wire.publish(following(job, number)) == [Outcome.OK]
    if end:
        assert await wire.worker.finish(following(job, last + 1, kind="finished")) is Outcome.OK


async def read(stream: EventStream) -> list[Event]:
    return [event async for event in stream]


def kinds(events: list[Event]) -> list[str]:
    return [event.type for event in events]


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


async def connections(client: redis.asyncio.Redis) -> list[dict[str, str]]:
    """All of this test's database, but the asking one."""
    database = str(client.connection_pool.connection_kwargs.get("db", 0))
    own = str(await client.client_id())
    return [each for each in await client.client_list() if each["db"] == database and each["id"] != own]


async def blocked_readers(client: redis.asyncio.Redis) -> list[dict[str, str]]:
    """The connections that wait in XREAD now, on this test's database."""
    return [each for each in await connections(client) if "b" in each["flags"]]


async def until_blocked(client: redis.asyncio.Redis, *, number: int = 1, idle_s: int = 0) -> None:
    async def waiting() -> bool:
        readers = await blocked_readers(client)
        return len(readers) == number and all(int(each["idle"]) >= idle_s for each in readers)

    await wait_until(waiting, what=f"{number} readers wait in XREAD for {idle_s} s")


def multiplexer_of(producer: InferenceClient) -> Multiplexer:
    """What the client's streams are read with, all together."""
    return shared_multiplexer(producer._source.redis, "inferq")


def line_of(producer: InferenceClient) -> redis.asyncio.Redis:
    return multiplexer_of(producer)._line
