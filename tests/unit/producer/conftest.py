"""A client and the hand of a worker on this test's own database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio
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
async def producer(redis_url: str) -> AsyncIterator[InferenceClient]:
    async with InferenceClient.from_url(redis_url, model="tiny") as inference:
        yield inference
