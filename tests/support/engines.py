"""Engines for tests: the real parent side over the scripted child, and what that child answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from inferq.engine import AsyncInferenceEngine, AsyncStream, Delta, EngineConfig, RestartPolicy, SamplingParams
from support.scripted import SCRIPTED_ENGINE, continuation
from support.waiting import wait_until

#: Starts the scripted engine with these flags and fields of EngineConfig.
Start = Callable[..., Awaitable[AsyncInferenceEngine]]
#: Longer than any test reads: such a request ends by an abort or by a death.
LONG = SamplingParams(max_tokens=30_000, ignore_eos=True)


def scripted_engine(
    cache: Path, *flags: str, log: Any = None, restart: RestartPolicy | None = None, **config: Any
) -> AsyncInferenceEngine:
    """An engine, not started yet, whose child is the scripted one with `flags`."""
    command = (sys.executable, str(SCRIPTED_ENGINE), *flags)
    return AsyncInferenceEngine(
        EngineConfig(model="scripted", cache_dir=str(cache), **config), command=command, log=log, restart=restart
    )


def child_of(engine: AsyncInferenceEngine) -> psutil.Process:
    """The process that runs now."""
    process = engine._supervisor._loop._process
    assert process is not None
    return psutil.Process(process.pid)


def up_to(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **fields)


def answer(prompt: str, num_tokens: int) -> str:
    """What the scripted child answers: a token is a character."""
    return bytes(continuation(list(prompt.encode()), num_tokens)).decode()


async def read_all(stream: AsyncStream) -> list[Delta]:
    return [delta async for delta in stream]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def until_drained(engine: AsyncInferenceEngine) -> None:
    """Return when no request is left anywhere and every block is free: what must hold after any load."""

    def drained() -> bool:
        stats = engine.stats
        return engine.idle and engine.num_requests == 0 and (stats is None or stats.used_blocks == 0)

    await wait_until(drained, what=f"drained: {engine!r} {engine.stats}")


async def running(stream: AsyncStream) -> Delta:
    """The first delta: its request has blocks in the child."""
    async with asyncio.timeout(60):
        return await anext(stream)
