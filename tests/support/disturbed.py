"""What the suite of faults shares: real workers, sixteen requests of every kind, and what must hold after any fault."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio

from inferq.producer import Delta, InferenceClient, Result
from inferq.producer.contract import Keys
from inferq.producer.events import TERMINAL_TYPES, Event

from .processes import WorkerProcess, all_gone, start_worker
from .queue import left_over
from .streams import events, starts_of, text_of, tokens_of
from .waiting import wait_until

MODEL = "smol"
KEYS = Keys(MODEL)
LEASE_SECONDS = 1.0
#: Generous: a run takes a few seconds, but the machine may have much else to do.
PATIENCE_SECONDS = 150.0

_TOPICS = ("rain", "bread", "the moon", "a river", "old maps", "paper", "salt", "glass")
_GREEDY = {"temperature": 0.0, "max_tokens": 40}
_SAMPLED = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 40}
#: Greedy and sampled, chats and bare prompts, each long enough to be disturbed in.
STREAMS: dict[str, dict[str, Any]] = {
    **{
        f"greedy-{n}": {
            "messages": [{"role": "user", "content": f"Tell me about {topic}."}],
            "sampling": {**_GREEDY, "ignore_eos": True},
        }
        for n, topic in enumerate(_TOPICS)
    },
    **{
        f"sampled-{n}": {
            "messages": [{"role": "user", "content": f"Invent a story of {topic} with many emoji 🦙."}],
            "sampling": {**_SAMPLED, "seed": 1000 + n, "ignore_eos": True, "stop": ["zebra crossing"]},
        }
        for n, topic in enumerate(_TOPICS[:5])
    },
    **{
        f"bare-{n}": {
            "prompt": f"The history of {topic} begins",
            "sampling": {**_SAMPLED, "top_k": 40, "seed": 2000 + n, "max_tokens": 32, "ignore_eos": True},
        }
        for n, topic in enumerate(_TOPICS[5:])
    },
}
#: What waits behind them.
SHORT: dict[str, dict[str, Any]] = {
    f"short-{n}": {"prompt": f"{topic.title()} is", "sampling": {"temperature": 0.0, "max_tokens": 2}}
    for n, topic in enumerate(_TOPICS)
}
#: A test of the suite of faults: a small run has three of them.
fault = pytest.mark.slow(family="faults", share=0.07)
Answers = dict[str, Result]
_ids = itertools.count()


@dataclass
class Fleet:
    """Workers of one server. Those that a test has not killed serve the next one."""

    url: str
    _stack: ExitStack
    _spare: list[WorkerProcess] = field(default_factory=list)
    _started: list[WorkerProcess] = field(default_factory=list)

    @classmethod
    @contextmanager
    def of(cls, url: str) -> Iterator[Fleet]:
        with ExitStack() as stack:
            fleet = cls(url, stack)
            yield fleet
            families = [process for worker in fleet._started if is_running(worker) for process in worker.family()]
        asyncio.run(all_gone(families, timeout=15))

    def start(self, *flags: str, **options: Any) -> WorkerProcess:
        """A new worker, which need not be ready yet."""
        name = f"w{next(_ids)}"
        worker = start_worker(
            self.url,
            "--model", "demo",
            "--served-model-name", MODEL,
            "--dtype", "float32",
            "--max-model-len", "2048",
            "--max-num-seqs", "16",
            "--lease-seconds", str(LEASE_SECONDS),
            "--heartbeat-seconds", "0.2",
            "--worker-id", name,
            *flags,
            **options,
        )  # fmt: skip
        started = self._stack.enter_context(worker)
        started.name = name
        self._started.append(started)
        return started

    async def take(self) -> WorkerProcess:
        """One that is ready and idle."""
        while self._spare:
            worker = self._spare.pop()
            if worker.process.poll() is None:
                return worker
        worker = self.start()
        await self.until_ready(worker)
        return worker

    async def only(self, *flags: str, **options: Any) -> WorkerProcess:
        """A new worker that is ready, and the only one."""
        await self.retire()
        worker = self.start(*flags, **options)
        await self.until_ready(worker)
        return worker

    async def retire(self, *keep: WorkerProcess) -> None:
        """End all others, also those that a test that failed has left: nobody else is to take what is disturbed."""
        for worker in [each for each in self._started if is_running(each) and each not in keep]:
            family = worker.family()
            for process in family:
                process.send_signal(signal.SIGCONT)
            worker.send(signal.SIGTERM)
            assert await worker.wait() == 0
            await all_gone(family, timeout=10)
        self._spare.clear()

    def spare(self, *workers: WorkerProcess) -> None:
        self._spare += [worker for worker in workers if worker.process.poll() is None]

    async def until_ready(self, worker: WorkerProcess) -> None:
        await wait_until(lambda: _is_ready(worker), timeout=PATIENCE_SECONDS, what=f"{worker.name} is ready")

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[InferenceClient]:
        async with InferenceClient.from_url(self.url, model=MODEL) as client:
            yield client


def is_running(worker: WorkerProcess) -> bool:
    return worker.process.poll() is None


def _is_ready(worker: WorkerProcess) -> bool:
    code = worker.process.poll()
    assert code is None, f"the worker exited with {code}:\n{worker.log[-3000:]}"
    return "worker.ready" in worker.log


async def undisturbed_answers(fleet: Fleet) -> Answers:
    worker = await fleet.take()
    async with fleet.producer() as producer:
        names = [*STREAMS, *SHORT]
        ids = [await producer.submit(**(STREAMS | SHORT)[name]) for name in names]
        results = await asyncio.gather(*(producer.result(request_id) for request_id in ids))
    fleet.spare(worker)
    return dict(zip(names, results, strict=True))


@dataclass
class Reading:
    """A reader that was there all along, and what it has got."""

    name: str
    request_id: str
    seen: list[Event] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(event.token_ids) for event in self.seen if isinstance(event, Delta))

    async def read(self, producer: InferenceClient) -> None:
        async for event in producer.stream(self.request_id):
            self.seen.append(event)


class Disturbance:
    """Sixteen streams under way, with a reader each, and perhaps short jobs that wait behind them."""

    def __init__(self, fleet: Fleet, producer: InferenceClient, names: Sequence[str] = tuple(STREAMS)) -> None:
        self.fleet = fleet
        self.producer = producer
        self.names = names
        self.streams: list[Reading] = []
        self.waiting: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, *, num_waiting: int = 0) -> None:
        for name in self.names:
            reading = Reading(name, await self.producer.submit(**STREAMS[name]))
            self.streams.append(reading)
            self._tasks.append(asyncio.create_task(reading.read(self.producer)))
        shorts = itertools.islice(itertools.cycle(SHORT), num_waiting)
        self.waiting = {await self.producer.submit(**SHORT[name]): name for name in shorts}

    @property
    def num_tokens(self) -> int:
        """That readers have by now, of all streams."""
        return sum(reading.num_tokens for reading in self.streams)

    async def until(self, num_tokens: int) -> None:
        """Return when the readers have so many tokens together."""
        await wait_until(
            lambda: self.num_tokens >= num_tokens or all(task.done() for task in self._tasks),
            timeout=PATIENCE_SECONDS,
            what=f"the streams have {num_tokens} tokens",
        )

    async def ended(self) -> None:
        """Return when every reader has come to its end."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*self._tasks)

    async def check(self, answers: Answers, *workers: WorkerProcess) -> None:
        """Every job has ended once, with the answer of the undisturbed run, for whoever reads it; nothing is left."""
        await self.ended()
        async with redis.asyncio.Redis.from_url(self.fleet.url) as client:
            for reading in self.streams:
                found = await events(client, KEYS, reading.request_id)
                assert_same(found, answers[reading.name])
                assert_same(reading.seen, answers[reading.name])
            for request_id, name in self.waiting.items():
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self.producer.result(request_id)
                assert_same(await events(client, KEYS, request_id), answers[name])
            for worker in workers:
                await until_empty(client, worker)
            assert await left_over(client) == set()
            await assert_all_expire(client)

    async def starts(self) -> list[tuple[int, int]]:
        """Of each `started` of all streams: the attempt, and the tokens that were there."""
        async with redis.asyncio.Redis.from_url(self.fleet.url) as client:
            found = [await events(client, KEYS, reading.request_id) for reading in self.streams]
        return [start for each in found for start in starts_of(each)]

    async def raw_starts(self) -> list[str]:
        """The data of each `started` of all streams, as it stands there."""
        async with redis.asyncio.Redis.from_url(self.fleet.url) as client:
            found = [await client.xrange(KEYS.events(reading.request_id)) for reading in self.streams]
        return [fields[b"d"].decode() for entries in found for _, fields in entries if fields[b"t"] == b"started"]


def assert_same(found: list[Any], answer: Result) -> None:
    """These events are one whole answer, the undisturbed one: no token twice, none missing, one end, the last."""
    assert [event.type in TERMINAL_TYPES for event in found].count(True) == 1
    assert found[-1].type == "finished", found[-1]
    tokens = chars = 0
    for event in found:
        if isinstance(event, Delta):
            assert (event.index, event.at) == (tokens, chars)
            tokens, chars = tokens + len(event.token_ids), chars + len(event.text)
    assert tuple(tokens_of(found)) == answer.token_ids
    assert text_of(found) == answer.text
    assert found[-1].finish_reasons == answer.finish_reasons
    assert found[-1].usage == answer.usage


async def until_empty(client: redis.asyncio.Redis, worker: WorkerProcess) -> None:
    """The worker says that it holds nothing any more: no job, no request, no block."""

    async def empty() -> bool:
        value = await client.get(KEYS.worker(worker.name))
        if value is None:
            return False
        state = json.loads(value)
        stats = state["stats"]
        return not (state["running"] or state["tracked"] or stats["used_blocks"] or stats["waiting"])

    await wait_until(empty, timeout=PATIENCE_SECONDS, what=f"{worker.name} holds nothing")


async def assert_all_expire(client: redis.asyncio.Redis) -> None:
    """Nothing stands in Redis for ever but what has members as long as it is needed."""
    for key in [key async for key in client.scan_iter(count=1000)]:
        if not key.endswith((b":workers", b":dead")):
            assert await client.ttl(key) != -1, key
