"""A client and the hand of a worker on this test's own database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from support.command_line import PROCESSES
from support.wire import Wire

from inferq.producer import InferenceClient


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERQ_MODEL", "INFERQ_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wire(client: redis.asyncio.Redis) -> Wire:
    """Both sides' commands, for the model `tiny`."""
    return Wire(client)


@pytest.fixture
async def served(wire: Wire) -> None:
    """A worker serves the model, so that no reader is told that there is none."""
    await wire.redis.set(wire.keys.card, '{"model":"tiny"}', px=600_000)


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[InferenceClient]:
    async with InferenceClient.from_url(redis_url, model="tiny") as inference:
        yield inference


@pytest.fixture
async def no_process_left() -> AsyncIterator[None]:
    yield
    while PROCESSES:
        process = PROCESSES.pop()
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()
    await asyncio.sleep(0)  # the transports' own farewell
