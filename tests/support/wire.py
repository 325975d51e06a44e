"""One served model's wire: the commands of both sides, and shorthands for what tests do with them."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from inferq.producer.commands import Enqueued, ProducerCommands
from inferq.producer.contract import Keys
from inferq.producer.events import Event, decode_event
from inferq.worker.commands import Claimed, Entry, Outcome, Reacquired, WorkerCommands

TERMINAL_DATA = {
    "finished": '{"finish_reasons":["stop"]}',
    "failed": '{"code":"internal","message":"a test","attempts":1}',
}


@dataclass
class Wire:
    """The commands of both sides on one server, and a look at what they leave there."""

    redis: redis.asyncio.Redis
    keys: Keys = field(default_factory=lambda: Keys("tiny"))

    def __post_init__(self) -> None:
        self.producer = ProducerCommands(self.redis, self.keys)
        self.worker = WorkerCommands(self.redis, self.keys)
        self._tokens = itertools.count(1)

    async def enqueue(self, request_id: str, payload: bytes = b"{}", **options: Any) -> Enqueued:
        defaults = {
            "deadline_ms": None,
            "priority": 0,
            "tenant": "",
            "trace": None,
            "fingerprint": "",
            "estimate": 0,
            "max_backlog": 1000,
        }
        return await self.producer.enqueue(request_id, payload, **(defaults | options))

    async def enqueue_plain(self, request_id: str, payload: bytes = b"{}", score: float | None = None) -> None:
        """What arq's own `enqueue_job` writes."""
        seconds, microseconds = await self.redis.time()
        score = seconds * 1000 + microseconds / 1000 if score is None else score
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.psetex(self.keys.payload(request_id), 60_000, payload)
            pipe.zadd(self.keys.queue, {request_id: score})
            await pipe.execute()

    async def claim(self, slots: int = 1, **options: Any) -> list[Claimed]:
        defaults = {
            "worker": "worker-1",
            "token": f"token-{next(self._tokens)}",
            "lease_ms": 60_000,
            "takeover": True,
            "max_attempts": 3,
            "accept_plain": True,
        }
        return await self.worker.claim(slots=slots, **(defaults | options))

    async def claimed(self, request_id: str = "a", **options: Any) -> Claimed:
        """A job that was just enqueued and claimed."""
        await self.enqueue(request_id, **options)
        (job,) = await self.claim(takeover=False)
        assert job.request_id == request_id
        return job

    async def reacquire(self, job: Claimed, **options: Any) -> Reacquired | None:
        defaults = {"token": job.token, "generation": job.generation, "epoch": job.epoch}
        defaults |= {"worker": "worker-1", "lease_ms": 60_000}
        return await self.worker.reacquire(job.request_id, **(defaults | options))

    async def hand_back(self, job: Claimed, number: int = 0) -> Outcome:
        """By the owner, whose last entry has that number."""
        expected_id = f"{job.epoch}-{number}"
        return await self.worker.hand_back(job.request_id, token=job.token, expected_id=expected_id)

    async def publish(self, *entries: Entry) -> list[Outcome]:
        return await self.worker.publish(entries)

    async def lapse(self, request_id: str, *, ended_ms: int = 1) -> None:
        """The lease has ended, at a time that was long ago if none is given."""
        await self.redis.delete(self.keys.lease(request_id))
        await self.redis.zadd(self.keys.running, {request_id: ended_ms}, xx=True)

    async def reader_leaves(self, request_id: str) -> None:
        """The presence of the job's last reader has run out."""
        await self.redis.delete(self.keys.reader(request_id))
        await self.redis.zadd(self.keys.deadlines, {request_id: 1}, xx=True)

    async def now_ms(self) -> int:
        """Redis' time."""
        seconds, microseconds = await self.redis.time()
        return int(seconds * 1000 + microseconds // 1000)

    async def order(self) -> list[str]:
        """The waiting jobs, in the order in which they are next."""
        return [each.decode() for each in await self.redis.zrange(self.keys.queue, 0, -1)]

    async def pass_deadline(self, request_id: str) -> None:
        """The job's deadline is now a time long gone."""
        await self.redis.hset(self.keys.job(request_id), "expires_at_ms", 1)
        await self.redis.zadd(self.keys.deadlines, {request_id: 1}, xx=True)

    async def everything(self) -> dict[bytes, bytes | None]:
        """The whole database, to show that a call changed nothing."""
        return {key: await self.redis.dump(key) for key in sorted(await self.redis.keys("*"))}

    async def entries(self, request_id: str) -> list[tuple[str, dict[bytes, bytes]]]:
        return [
            (entry_id.decode(), fields) for entry_id, fields in await self.redis.xrange(self.keys.events(request_id))
        ]

    async def events(self, request_id: str) -> list[Event]:
        """Every entry of the stream, read as a client reads it."""
        decoded = [decode_event(fields) for _, fields in await self.entries(request_id)]
        assert None not in decoded
        return decoded

    async def types(self, request_id: str) -> list[str]:
        return [event.type for event in await self.events(request_id)]

    async def job_keys(self, request_id: str) -> set[str]:
        """What exists of a job besides its stream, by the short names of its keys and sets."""
        keys = self.keys
        named = {
            "job": keys.job(request_id),
            "payload": keys.payload(request_id),
            "lease": keys.lease(request_id),
            "cancel": keys.cancel(request_id),
            "reader": keys.reader(request_id),
        }
        found = {name for name, key in named.items() if await self.redis.exists(key)}
        sets = {"queue": keys.queue, "running": keys.running, "deadlines": keys.deadlines}
        return found | {name for name, key in sets.items() if await self.redis.zscore(key, request_id) is not None}


def following(job: Claimed, number: int = 1, *, kind: str = "delta") -> Entry:
    """The owner's entry `number` behind the `started` that it goes on from, which is entry 0."""
    index = sum(job.resumed_tokens) + number - 1
    data = TERMINAL_DATA.get(kind) or f'{{"index":{index},"at":{index},"text":"x","token_ids":[{index + 1}]}}'
    return Entry(job.request_id, job.token, f"{job.epoch}-{number - 1}", f"{job.epoch}-{number}", kind, data)


def after(job: Claimed, got: Reacquired) -> Claimed:
    """The job as its owner has it after it got it back."""
    return dataclasses.replace(job, epoch=got.epoch, resumed=True, resumed_tokens=got.resumed_tokens)
