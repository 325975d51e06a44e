"""Is the worker of this host alive? For a container's health check: `python -m inferq.worker.probe`, exit code 0 or 1.

Reads the worker's sign of life in Redis, by the `INFERQ_*` variables that the worker itself reads; loads no model
library, so that a probe costs little. A worker that is still loading its model has given none yet.
"""

from __future__ import annotations

import json
import socket
import sys

import redis

from .settings import InvalidSettings, WorkerSettings, read_settings

TIMEOUT_S = 3.0


def is_alive(settings: WorkerSettings, host: str) -> bool:
    """True if a worker on `host` has shown itself within three heartbeats. Raises redis.RedisError."""
    keys = settings.keys
    with redis.Redis.from_url(settings.redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as client:
        workers = [worker.decode() for worker in client.zrange(keys.workers, 0, -1)]
        states = client.mget([keys.worker(worker) for worker in workers]) if workers else []
    return any(json.loads(state).get("host") == host for state in states if state is not None)


def main() -> int:
    try:
        alive = is_alive(read_settings([]), socket.gethostname())
    except (InvalidSettings, redis.RedisError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0 if alive else 1


if __name__ == "__main__":
    sys.exit(main())
