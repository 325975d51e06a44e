"""The worker's sign of life: what it serves, what it runs, and that it is there.

Each heartbeat writes three keys that vanish by themselves three periods after the last one, and asks Redis for its
time. Knows facts and what is said of them; changes nothing of the work.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from arq.connections import ArqRedis

from inferq.engine.async_engine import AsyncInferenceEngine
from inferq.engine.pipe import Stats

from .clock import RedisClock
from .commands import WorkerCommands
from .settings import WorkerSettings


class Health:
    """`running` says how many requests the worker has claimed and not ended."""

    def __init__(
        self,
        settings: WorkerSettings,
        redis: ArqRedis,
        commands: WorkerCommands,
        engine: AsyncInferenceEngine,
        clock: RedisClock,
        *,
        running: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._keys = settings.keys
        self._redis = redis
        self._commands = commands
        self._engine = engine
        self._clock = clock
        self._running = running
        self._started_at_ms: int | None = None

    async def beat(self) -> None:
        """Raises redis-py's errors."""
        asked = time.monotonic()
        redis_time = await self._redis.time()
        self._clock.measured(asked, time.monotonic(), redis_time)
        self._started_at_ms = self._started_at_ms or int(self._clock.now_ms())
        card, state = json.dumps(self.card()), json.dumps(self.state())
        ttl_ms = self._settings.heartbeat_ttl_ms
        await self._commands.beat(self._settings.worker_id, card, state, ttl_ms=ttl_ms)

    async def remove(self) -> None:
        """Take the worker off the list. The card stays for its time: another worker may serve the same model."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(self._keys.worker(self._settings.worker_id))
            pipe.zrem(self._keys.workers, self._settings.worker_id)
            await pipe.execute()

    @property
    def names(self) -> dict[str, Any]:
        """What the worker goes by, for its log."""
        return {"worker": self._settings.worker_id, "model": self._keys.model, "prefix": self._keys.prefix}

    def card(self) -> dict[str, Any]:
        """What `submit` may check a request against. The same for every worker of a model."""
        facts = self._engine.facts
        return {
            "model": self._keys.model,
            "vocab_size": facts.vocab_size,
            "max_model_len": facts.max_model_len,
            "max_num_seqs": facts.max_num_seqs,
            "max_backlog": self._settings.max_backlog,
            "features": [],
        }

    def state(self) -> dict[str, Any]:
        facts = self._engine.facts
        stats = self._engine.stats or Stats(0, 0, 0, 0, facts.num_blocks, 0)
        return {
            "worker": self._settings.worker_id,
            "model": self._keys.model,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "running": self._running(),
            "tracked": self._engine.num_requests,
            "slots": facts.max_num_seqs,
            "started_at_ms": self._started_at_ms,
            "heartbeat_ms": self._settings.heartbeat_ms,
            "version": version("inferq"),
            "device": facts.device,
            "dtype": facts.dtype,
            "stats": asdict(stats),
        }
