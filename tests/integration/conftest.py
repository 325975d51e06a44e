"""One real worker with the real model, for the suites that follow requests from end to end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio
from support.processes import WorkerProcess, start_worker
from support.servers import valkey, wait_for_server
from support.waiting import wait_until

from inferq.producer import InferenceClient

MODEL = "smol"


@dataclass(frozen=True)
class RealWorker:
    """A worker that serves SmolLM2 in fp32, and the ways to look at it from outside."""

    process: WorkerProcess
    url: str

    @asynccontextmanager
    async def client(self) -> AsyncIterator[InferenceClient]:
        async with InferenceClient.from_url(self.url, model=MODEL) as client:
            yield client

    async def heartbeat(self) -> dict[str, Any]:
        """What the worker last said of itself."""
        async with redis.asyncio.Redis.from_url(self.url) as connection:
            (worker,) = await connection.zrange("inferq:workers", 0, -1)
            value = await connection.get(f"inferq:worker:{worker.decode()}")
        return dict(json.loads(value))

    async def until_idle(self) -> dict[str, Any]:
        """Return the heartbeat that shows no running request and no used block."""

        async def idle() -> dict[str, Any] | None:
            beat = await self.heartbeat()
            nothing = beat["running"] == 0 and beat["stats"]["used_blocks"] == 0 and beat["stats"]["waiting"] == 0
            return beat if nothing and beat["tracked"] == 0 else None

        return await wait_until(idle, timeout=90, what="the worker is idle")  # type: ignore[return-value]


@pytest.fixture(scope="session")
def real_worker() -> Any:
    """A worker process with a server of its own, in fp32 so that texts can be compared."""
    with valkey() as url:
        wait_for_server(url)
        with start_worker(
            url,
            "--model", "demo",
            "--served-model-name", MODEL,
            "--dtype", "float32",
            "--max-model-len", "8192",
            "--max-num-seqs", "64",
            "--heartbeat-seconds", "0.2",
        ) as process:  # fmt: skip
            asyncio.run(process.until_ready(MODEL))
            yield RealWorker(process, url)
