"""Waiting for facts, never for time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def wait_until(fact: Callable[[], T | Awaitable[T]], *, timeout: float = 60.0, what: str = "") -> T:
    """Return the first true value of `fact` (a function, or one that returns an awaitable).

    Raises AssertionError that names `what` when it stays false for `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        value = fact()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value  # type: ignore[return-value]
        if time.monotonic() > end:
            raise AssertionError(f"still not true after {timeout} s: {what or inspect.getsource(fact).strip()}")
        await asyncio.sleep(0.005)
