"""The composition root of `inferq-worker`: what there is, in which order it lives, and what the exit code says.

0  stopped by SIGTERM or SIGINT: its running requests had their time, and what was left went back to the queue
1  the engine died for good, the embedded server died, Redis refuses for good what the worker needs, or something here
   is broken
2  a flag or variable is wrong, or something that was asked for is not there: a model, a device, a package
3  Redis cannot be reached at the start
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from enum import IntEnum
from typing import Any, Final

from inferq.engine.async_engine import DEFAULT_COMMAND, AsyncInferenceEngine
from inferq.engine.errors import EngineError, SettingError
from inferq.engine.pipe import Log
from inferq.producer.errors import InferqError

from . import log
from .embedded import EmbeddedServer, EmbeddedServerError, embedded_server
from .errors import RedisRefuses, ShuttingDown
from .queue import QueueWorker
from .service import RedisAway, open_redis, running_service
from .settings import PROGRAM, SECRETS, InvalidSettings, WorkerSettings, flag_of, read_settings
from .signals import Stopped, StopSignals, first_of

#: What is left of the requests after the drain has so long to be handed back.
_CLOSE_SECONDS: Final = 5.0
_log = log.get_logger("main")
_engine_log: Any = log.get_logger("engine")


class Exit(IntEnum):
    STOPPED = 0
    BROKEN = 1
    USAGE = 2
    NO_REDIS = 3


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> Exit:
    """Run a worker with these flags until it is stopped."""
    try:
        settings = read_settings(argv)
    except InvalidSettings as exc:
        return _refuse(Exit.USAGE, exc)
    for name in SECRETS:
        os.environ.pop(name, None)  # what the engine loads, which may be code that came with a model, needs none
    log.setup(settings.log_level, settings.log_format)
    try:
        return asyncio.run(_serve(settings))
    except Stopped:
        return Exit.STOPPED
    except RedisAway as exc:
        return _refuse(Exit.NO_REDIS, exc)
    except SettingError as exc:
        return _refuse(Exit.USAGE, InvalidSettings(f"{flag_of(exc.setting)}: {exc}"))
    except (EmbeddedServerError, InferqError) as exc:
        return _refuse(Exit.USAGE, exc)
    except Exception as exc:
        for each in exc.exceptions if isinstance(exc, ExceptionGroup) else (exc,):
            if isinstance(each, RedisRefuses):
                _log.critical("redis.unusable", part=each.role, reason=each.reason)
            else:
                _log.critical("worker.broke", **log.cause(each))
        return Exit.BROKEN


def _refuse(code: Exit, exc: Exception) -> Exit:
    sys.stderr.write(f"{PROGRAM}: {' '.join(str(exc).split())}\n")
    return code


async def _serve(settings: WorkerSettings) -> Exit:
    asyncio.get_running_loop().set_exception_handler(_log_stray)
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(StopSignals(ends_process=True))
        server = None
        if settings.embedded:
            server = await signals.unless_asked(stack.enter_async_context(embedded_server(settings.embedded_dir)))
        url = server.url if server else settings.redis_url
        redis = await signals.unless_asked(stack.enter_async_context(open_redis(url)))
        command = settings.engine_arguments or DEFAULT_COMMAND
        engine = AsyncInferenceEngine(
            settings.engine_config(), command=command, log=_log_engine, restart=settings.restart_policy
        )
        stack.push_async_callback(engine.stop)
        await first_of(_start(engine), signals.asked.wait(), *([server.wait_dead()] if server else []))
        if server and not server.is_running:
            _log.critical("server.died")
            return Exit.BROKEN
        if not engine.is_running:
            return Exit.STOPPED if signals.asked.is_set() else Exit.BROKEN
        worker = await stack.enter_async_context(running_service(settings, redis, engine))
        return await _work(settings, worker, engine, server, signals)


async def _start(engine: AsyncInferenceEngine) -> None:
    """Returns when the engine is ready, or dead. Raises SettingError where a setting is the reason."""
    try:
        facts = await engine.start_engine_loop()
    except SettingError:
        raise
    except EngineError as exc:
        _log.critical("engine.unusable", reason=str(exc))
    else:
        _log.info(
            "engine.ready",
            model=facts.model,
            device=facts.device,
            dtype=facts.dtype,
            attention=facts.attention,
            blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
        )


async def _work(
    settings: WorkerSettings,
    worker: QueueWorker,
    engine: AsyncInferenceEngine,
    server: EmbeddedServer | None,
    signals: StopSignals,
) -> Exit:
    """Until a signal comes, or what the worker stands on has died; then end in good order."""
    deaths: list[Callable[[], Any]] = [engine.wait_dead, *([server.wait_dead] if server else [])]

    def died() -> str | None:
        if server and not server.is_running:
            return "server"
        return None if engine.is_running else "engine"

    await first_of(signals.asked.wait(), *(death() for death in deaths))
    worker.stop_picking()
    if not died():
        _log.info("worker.draining", running=worker.job_counter, seconds=settings.drain_seconds)
        ends = (worker.wait_idle(), signals.hurried.wait(), *(death() for death in deaths))
        await first_of(*ends, timeout=settings.drain_seconds)
    dead = died()
    worker.interrupt_all(ShuttingDown())
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await worker.wait_idle()
    reason = str(await engine.wait_dead()) if dead == "engine" else None
    (_log.critical if dead else _log.info)("worker.stopped", died=dead, reason=reason, left_behind=worker.job_counter)
    return Exit.BROKEN if dead else Exit.STOPPED


def _log_engine(line: Log) -> None:
    getattr(_engine_log, line.level, _engine_log.info)(line.event, details=line.details)


def _log_stray(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's own handler prints arguments and messages, which may be a user's text."""
    exc = context.get("exception")
    _log.error("loop.error", **(log.cause(exc) if exc is not None else {}))


if __name__ == "__main__":
    main()
