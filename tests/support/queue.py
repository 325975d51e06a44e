"""What the suites of the queue share: workers with a scripted engine, and jobs in every shape."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from arq.jobs import serialize_job

from inferq.producer.contract import Keys, encode_json

from .processes import WorkerProcess, scripted, start_worker
from .scripted import continuation

MODEL = "scripted"
KEYS = Keys(MODEL)
#: Long enough that nothing ends by itself while a test looks, whatever its step time.
ENDLESS = {"max_tokens": 20_000, "ignore_eos": True}


@asynccontextmanager
async def scripted_worker(
    url: str, *flags: str, engine: Sequence[str] = (), **options: Any
) -> AsyncIterator[WorkerProcess]:
    """A worker that is ready. Its log is shown when the test fails, and may hold no trace of a broken part."""
    environment = scripted(*engine) | options.pop("environment", {})
    with start_worker(url, "--served-model-name", MODEL, *flags, environment=environment) as worker:
        try:
            await worker.until_ready(MODEL)
            yield worker
        except BaseException as exc:
            exc.add_note(f"the worker's log:\n{worker.log[-4000:]}")
            raise
        assert "Traceback" not in worker.log, worker.log
        assert "worker.broke" not in worker.log, worker.log


def answer_to(prompt: str, count: int) -> str:
    """What the scripted engine says after a prompt."""
    return bytes(continuation(list(prompt.encode()), count)).decode()


def arq_payload(function: str = "generate", args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> bytes:
    data = serialize_job(function, tuple(args), kwargs or {}, None, 1, serializer=encode_json)
    assert data is not None
    return data


async def put_plain(client: redis.asyncio.Redis, payload: bytes, request_id: str | None = None) -> str:
    """What arq's `enqueue_job` writes, around any bytes."""
    request_id = request_id or uuid.uuid4().hex
    async with client.pipeline(transaction=True) as pipe:
        pipe.psetex(KEYS.payload(request_id), 60_000, payload)
        pipe.zadd(KEYS.queue, {request_id: time.time() * 1000})
        await pipe.execute()
    return request_id


async def left_over(client: redis.asyncio.Redis) -> set[str]:
    """Keys besides streams, the workers' signs of life, and what belongs to no job."""
    names = {key.decode() async for key in client.scan_iter(count=1000)}
    ignored = (":events", ":card", ":bell", ":workers", ":wake")
    return {name for name in names if not name.endswith(ignored) and not name.startswith("inferq:worker:")}
