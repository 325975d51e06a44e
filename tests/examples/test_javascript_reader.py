"""The reader in JavaScript does what the Python one does: on random streams, and on those of real workers."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import pytest
import redis.asyncio
from support.acl import PASSWORDS, secured_server
from support.node import needs_node, node
from support.queue import KEYS, MODEL, answer_to, scripted_worker
from support.restarts import RestartableServer, restartable_server
from support.servers import server_binary
from support.streams import until_delta, until_ended
from support.tree import ROOT
from unit.producer import test_reader_property as plays

from inferq.producer import InferenceClient, JobLost, NoWorker, RequestReplaced
from inferq.producer.position import START, Position
from inferq.producer.reader import Entry, Item, StreamReader

READ = ROOT / "examples" / "javascript_reader" / "read.mjs"
REPLAY = ROOT / "tests" / "examples" / "replay_reader.mjs"
SLOW = ["--step-ms", "10"]
SHORT = ("--lease-seconds", "1")

pytestmark = needs_node


def as_json(item: Item) -> dict[str, Any]:
    return {"position": str(item.position), **item.event.model_dump(mode="json", exclude_none=True)}


def as_answered(entry: Entry) -> list[Any]:
    """As Redis answers it, and JSON can say it."""
    raw_id, fields = entry
    return [raw_id.decode(), [each.decode() for field in fields.items() for each in field]]


class Recorded(StreamReader):
    """Keeps what it was asked, and what it did."""

    all: list[Recorded]

    def __init__(self, request_id: str, position: Position = START) -> None:
        super().__init__(request_id, position)
        self.position = str(position)
        self.calls: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = []
        self.all.append(self)

    def feed(self, entries: Sequence[Entry]) -> Iterator[Item]:
        call: dict[str, Any] = {"feed": [as_answered(entry) for entry in entries], "take": None}
        items: list[dict[str, Any]] = []
        try:
            for item in super().feed(entries):
                items.append(as_json(item))
                yield item
        except GeneratorExit:
            call["take"] = len(items)
            raise
        except (JobLost, RequestReplaced) as error:
            self._keep(call, {"items": items, "error": type(error).__name__})
            raise
        finally:
            self._keep(call, {"items": items, **self._state()})

    def tail(self, last: Entry | None) -> None:
        super().tail(last)
        self._keep({"tail": as_answered(last) if last else None}, {"items": [], **self._state()})

    def _keep(self, call: dict[str, Any], outcome: dict[str, Any]) -> None:
        if not self.calls or self.calls[-1] is not call:
            self.calls.append(call)
            self.outcomes.append(outcome)

    def _state(self) -> dict[str, Any]:
        return {"cursor": str(self.cursor), "rereading": self.rereading, "done": self.done}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Every reader of the plays from now on."""
    Recorded.all = []
    monkeypatch.setattr(plays, "StreamReader", Recorded)
    return Recorded.all


async def assert_same(readers: list[Recorded]) -> None:
    """The other reader, asked the same, did the same at every step."""
    given = "".join(json.dumps({"position": each.position, "calls": each.calls}) + "\n" for each in readers)
    async with node(REPLAY, given=given) as program:
        printed = await program.ended()
    assert len(printed) == len(readers)
    for reader, outcomes in zip(readers, printed, strict=True):
        assert outcomes == reader.outcomes, reader.calls


async def test_it_makes_the_same_of_random_streams(recorded: list[Recorded]) -> None:
    """Whatever owners, lost leases and failovers do to them, from the start and from any position."""
    rng = random.Random(11)
    for seed in range(400):
        log, consumer = plays.play(rng.choices(plays.OPERATIONS, k=50), seed, rng.choice((1, 2, 3)), bool(seed % 2))
        positions = [START.entry, *(entry for entry, _ in log.entries)]
        again = Recorded("r", Position(rng.choice(positions), None))  # an entry id alone
        again.tail(log.after(START.entry, None)[-1])
        while not again.done:
            list(again.feed(log.after(again.cursor, None)))
        plays.check(log, consumer)
    items = sum(len(outcome["items"]) for reader in recorded for outcome in reader.outcomes)
    rereads = sum(outcome["rereading"] for reader in recorded for outcome in reader.outcomes)
    assert len(recorded) > 800 and items > 5000 and rereads > 500, "the plays say something"
    await assert_same(recorded)


QUEUED = {"v": 1, "generation": 5, "enqueued_at_ms": 1}
DELTA = {"choice": 0, "index": 0, "at": 0, "text": "a🦙", "token_ids": [7]}
FAILED = {"code": "internal", "message": "a test", "attempts": 1}


@pytest.mark.parametrize(
    "entries",
    [
        [("queued", QUEUED), ("delta", DELTA | {"index": 1})],
        [("queued", QUEUED), ("delta", DELTA), ("delta", DELTA | {"index": 1, "at": 3})],
        [("queued", QUEUED), ("delta", DELTA), ("delta", DELTA | {"index": 1, "at": 2, "text": "b"})],
        [("queued", QUEUED), ("delta", DELTA | {"choice": 128})],
        [("queued", QUEUED), ("delta", DELTA | {"choice": -1})],
        [("queued", QUEUED), ("delta", DELTA | {"at": "there"}), ("delta", {"text": "no more"})],
        [("queued", QUEUED), ("delta", "no JSON")],
        [("queued", QUEUED), ("queued", QUEUED | {"generation": 6})],
        [("queued", QUEUED), ("news", {"x": 1}), ("delta", DELTA), ("failed", FAILED)],
        [("queued", QUEUED), ("delta", DELTA), ("failed", FAILED)],
    ],
)
async def test_it_refuses_the_same_streams(recorded: list[Recorded], entries: list[tuple[str, Any]]) -> None:
    raw = [
        (
            f"5-{number}".encode(),
            {b"t": kind.encode(), b"d": (data if isinstance(data, str) else json.dumps(data)).encode()},
        )
        for number, (kind, data) in enumerate(entries)
    ]
    reader = Recorded("r")
    try:
        list(reader.feed(raw))
    except (JobLost, RequestReplaced):
        pass
    await assert_same(recorded)


async def python_events(producer: InferenceClient, request_id: str, position: str = "0") -> list[dict[str, Any]]:
    stream = producer.stream(request_id, position)
    return [
        {"position": stream.position, **event.model_dump(mode="json", exclude_none=True)}
        async for event in stream
        if not isinstance(event, NoWorker)
    ]


@pytest.mark.slow
async def test_it_reads_through_a_takeover(redis_url: str, client: redis.asyncio.Redis) -> None:
    """The first worker is killed while both readers look on; the second goes on in another epoch."""
    async with InferenceClient.from_url(redis_url, model=MODEL) as producer:
        async with scripted_worker(redis_url, *SHORT, engine=SLOW) as first:
            request_id = await producer.submit("taken over", sampling={"max_tokens": 200})
            seen = asyncio.create_task(python_events(producer, request_id))
            async with node(READ, redis_url, request_id) as live:
                await live.until(30)
                first.send(signal.SIGKILL)
                async with scripted_worker(redis_url, *SHORT, engine=SLOW):
                    await until_ended(client, KEYS, request_id)
                    assert await live.ended() == await seen
        resumed = [event["resumed_tokens"][0] for event in live.printed if event["type"] == "started"]
        assert resumed[0] == 0 and resumed[1] >= 28 and len(resumed) == 2
        assert "".join(event["text"] for event in live.printed if event["type"] == "delta") == answer_to(
            "taken over", 200
        )
        everything = await python_events(producer, request_id)
        rng = random.Random(3)
        for event in [everything[0], *rng.sample(everything[1:-1], 4), everything[-1]]:
            for position in (event["position"], event["position"].partition(":")[0]):
                async with node(READ, redis_url, request_id, position) as rest:
                    assert await rest.ended() == await python_events(producer, request_id, position)
                assert rest.printed == everything[everything.index(event) + 1 :]


async def test_it_waits_from_the_queue_on_and_hears_of_a_cancellation(redis_url: str) -> None:
    async with InferenceClient.from_url(redis_url, model=MODEL) as producer:
        request_id = await producer.submit("waits", sampling={"max_tokens": 20})
        async with node(READ, redis_url, request_id) as reader:
            await reader.until(1)
            assert reader.printed[0]["type"] == "queued"
            await producer.cancel(request_id)
            assert (await reader.ended())[-1]["finish_reasons"] == ["cancelled"]


@pytest.mark.slow
async def test_it_survives_a_failover() -> None:
    """The promoted replica lacks what both readers have read already. Its owner says that again."""
    with restartable_server() as server:
        await _fail_over(server)


async def _fail_over(server: RestartableServer) -> None:
    async with (
        redis.asyncio.Redis.from_url(server.url) as client,
        InferenceClient.from_url(server.url, model=MODEL) as producer,
        scripted_worker(server.url, engine=["--step-ms", "20"]),
    ):
        request_id = await producer.submit("fails over", sampling={"max_tokens": 300})
        async with node(READ, server.url, request_id) as reader:
            await until_delta(client, KEYS, request_id, at_least=40)
            server.replicate()
            await reader.until(100)
            server.fail_over()
            printed = await reader.ended()
        deltas = [event for event in printed if event["type"] == "delta"]
        assert bytes(token for delta in deltas for token in delta["token_ids"]).decode() == answer_to("fails over", 300)
        assert "".join(delta["text"] for delta in deltas) == answer_to("fails over", 300)
        assert [event["type"] for event in printed].count("finished") == 1


async def test_it_says_what_is_wrong(redis_url: str) -> None:
    async with node(READ, redis_url, "nobody") as unknown:
        assert "UnknownRequest" in await unknown.failed()
    async with node(READ, redis_url, "nobody", "somewhere") as nowhere:
        assert "not a position" in await nowhere.failed()
    async with node(READ, "http://localhost", "nobody") as elsewhere:
        assert "redis://" in await elsewhere.failed()
    async with node(READ) as alone:
        assert "usage" in await alone.failed()


async def test_the_rights_of_a_reader_are_enough() -> None:
    """By TCP, as the user that may only read, with a password that must be encoded in a URL."""
    with secured_server(server_binary()) as secured:

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream, downstream = await asyncio.open_unix_connection(secured.socket)
            await asyncio.gather(_pump(reader, downstream), _pump(upstream, writer))

        async with (
            await asyncio.start_server(forward, "127.0.0.1") as entrance,
            InferenceClient.from_url(secured.url("producer"), model=MODEL) as producer,
        ):
            port = entrance.sockets[0].getsockname()[1]
            request_id = await producer.submit("Hello")
            url = f"redis://reader:{quote(PASSWORDS['reader'], safe='')}@127.0.0.1:{port}/0"
            async with node(READ, url, request_id) as reader:
                await reader.until(1)
                await producer.cancel(request_id)
                assert [event["type"] for event in await reader.ended()] == ["queued", "finished"]
            async with node(READ, url.replace("reader:", "reader:not-"), request_id) as stranger:
                assert "WRONGPASS" in await stranger.failed()
        assert {user for user, _ in secured.refusals()} <= {"reader"}  # of the wrong password


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
    target.close()
