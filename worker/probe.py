"""Is the worker of this host alive? For a container's health check: `python -m inferq.worker.probe`, exit code 0 or 1.

Reads the worker's sign of life in Redis, by the `INFERQ_*` variables that the worker itself reads; loads no model
library, so that a probe costs little. A worker that is still loading its model has given none yet.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

from inferq.producer.connection import connect
from inferq.producer.errors import InferqError

from .background import REDIS_ERRORS
from .settings import InvalidSettings, WorkerSettings, read_settings

TIMEOUT_S = 3.0


async def is_alive(settings: WorkerSettings, host: str) -> bool:
    """True if a worker on `host` has shown itself within three heartbeats. Raises redis-py's errors."""
    keys = settings.keys
    limits = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    async with connect(settings.redis_url, retries=0, **limits) as client:
        workers = [worker.decode() for worker in await client.zrange(keys.workers, 0, -1)]
        states = await client.mget([keys.worker(worker) for worker in workers]) if workers else []
    return any(json.loads(state).get("host") == host for state in states if state is not None)


def main() -> int:
    try:
        alive = asyncio.run(is_alive(read_settings([]), socket.gethostname()))
    except (InvalidSettings, InferqError, *REDIS_ERRORS) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0 if alive else 1


if __name__ == "__main__":
    sys.exit(main())
