"""The parts of a worker put together: what claims, publishes, renews, listens and shows signs of life.

All of them run while the context is open. Knows how the parts are joined; each of them knows its own work only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ssl import SSLError
from typing import Any, Final

from arq.connections import ArqRedis
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import ResponseError

from inferq.engine.async_engine import AsyncInferenceEngine
from inferq.producer.backoff import Backoff
from inferq.producer.commands import ProducerCommands
from inferq.producer.connection import LOST, blocking_connection, connect, is_refusal

from .background import REDIS_ERRORS, Outage, end, every, persist
from .bell import QueueBell
from .cancellation import CancellationBell
from .clock import RedisClock
from .commands import Claimed, WorkerCommands
from .generate import Generation
from .health import Health
from .leases import Leases
from .log import get_logger
from .publisher import Publisher
from .queue import QueueWorker
from .recovery import Recovery
from .room import EngineRoom
from .settings import WorkerSettings

#: A server that is starting beside the worker has so long.
_REACH_SECONDS: Final = 5.0
_EXPIRE_SECONDS: Final = 1.0
_FAREWELL_SECONDS: Final = 1.0
_log = get_logger("service")


class RedisAway(Exception):
    """Redis cannot be reached at the start."""


@asynccontextmanager
async def open_redis(url: str) -> AsyncIterator[ArqRedis]:
    """A connection whose server has answered. Raises RedisAway, and UnsuitableConnection for a URL that is none.

    A claim that is sent twice takes jobs twice, so commands are never sent again by the connection itself. It is given
    up with any of these errors: a server that has become a replica stays one, and the next connection may find another.
    """
    redis = connect(url, retries=0, retry_on_error=list(LOST))
    try:
        await _reach(redis)
        await _look_at_settings(redis)
        yield redis
    finally:
        await redis.aclose()


async def _reach(redis: ArqRedis) -> None:
    backoff, problem = Backoff(), "no answer"
    try:
        async with asyncio.timeout(_REACH_SECONDS):
            while True:
                try:
                    await redis.ping()
                    return
                except REDIS_ERRORS as exc:
                    if is_refusal(exc):
                        raise RedisAway("Redis refuses the credentials of --redis-url") from None
                    problem = _problem(exc)
                await asyncio.sleep(backoff.next())
    except TimeoutError:
        raise RedisAway(
            f"Redis cannot be reached at {_place(redis)} ({problem}): start it there, name another by --redis-url, "
            "or give --embedded"
        ) from None


def _problem(error: BaseException) -> str:
    """The kind of error; of TLS also what is wrong, which is never a server that is not there."""
    chain = (error, error.__cause__, error.__context__)
    return next((str(each) for each in chain if isinstance(each, SSLError)), type(error).__name__)


def _place(redis: ArqRedis) -> str:
    """Where the server should be, without user and password."""
    pool = redis.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        sentinels = (each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels)
        places = ", ".join(f"{each['host']}:{each['port']}" for each in sentinels)
        return f"the primary of {pool.service_name!r} that Sentinel names at {places}"
    options = pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


async def _look_at_settings(redis: ArqRedis) -> None:
    """Warn of a server that may throw accepted jobs away: when it is full, or when it starts again.

    INFO tells all but one of it, so that a worker's user needs no right to the configuration, which has passwords.
    """
    with contextlib.suppress(ResponseError):
        found: dict[str, Any] = await redis.info("memory") | await redis.info("persistence")
        policy = found.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            _log.warning("redis.may_evict_jobs", policy=policy, wanted="noeviction")
        if found.get("aof_enabled") == 0 and (save := await _snapshots(redis)) in ("", None):
            _log.warning("redis.keeps_nothing", appendonly="no", save=save, wanted="appendonly yes")


async def _snapshots(redis: ArqRedis) -> str | None:
    """When the server writes snapshots: never if empty. None for a user who may not ask."""
    try:
        return str((await redis.config_get("save")).get("save", ""))
    except ResponseError:
        return None


@asynccontextmanager
async def running_service(
    settings: WorkerSettings, redis: ArqRedis, engine: AsyncInferenceEngine
) -> AsyncIterator[QueueWorker]:
    """Work until the block is left. Raises an ExceptionGroup, and ends the block, if a part is broken."""
    clock, commands = RedisClock(), WorkerCommands(redis, settings.keys)
    publisher = Publisher(commands)
    recovery = Recovery(
        commands, publisher, redis, settings.keys, worker=settings.worker_id, lease_ms=settings.lease_ms
    )

    def open_generation(claimed: Claimed) -> Generation:
        return Generation(
            claimed,
            model=settings.keys.model,
            engine=engine,
            publisher=publisher,
            recovery=recovery,
            clock=clock,
            max_unsent_tokens=settings.max_unsent_tokens,
        )

    worker = QueueWorker(
        settings, redis, commands, room=EngineRoom(engine), clock=clock, open_generation=open_generation
    )
    health = Health(settings, redis, commands, engine, clock, running=lambda: len(worker.generations))
    leases = Leases(commands, worker.generations, settings.lease_ms)
    expire = ProducerCommands(redis, settings.keys).expire
    async with (
        blocking_connection(redis) as bell_line,
        blocking_connection(redis) as control_line,
        asyncio.TaskGroup() as group,
    ):
        bell = QueueBell(bell_line, settings.keys.bell, wanted=worker.has_room, ring=worker.ring)
        cancellations = CancellationBell(control_line, settings.keys.control, leases)
        parts = [
            group.create_task(_claim(worker, health)),
            group.create_task(publisher.run()),
            group.create_task(recovery.run()),
            group.create_task(every(settings.renew_seconds, leases.renew, role="leases")),
            group.create_task(every(_EXPIRE_SECONDS, expire, role="expiry")),
            group.create_task(every(settings.heartbeat_seconds, health.beat, role="health")),
            group.create_task(bell.listen()),
            group.create_task(cancellations.listen()),
        ]
        try:
            yield worker
        finally:
            await end(parts)
            with contextlib.suppress(*REDIS_ERRORS):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await health.remove()


async def _claim(worker: QueueWorker, health: Health) -> None:
    """Claim nothing before Redis' time is known and the worker is on the list."""
    await persist(health.beat, Outage("health"))
    _log.info("worker.ready", slots=worker.max_jobs, **health.names)
    await worker.async_run()
