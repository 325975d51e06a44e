"""The wire of one served model, on this test's own database."""

from __future__ import annotations

import pytest
import redis.asyncio
from support.wire import Wire


@pytest.fixture
def wire(client: redis.asyncio.Redis) -> Wire:
    return Wire(client)
