"""Cancelling what waits for redis-py, which may lose a cancellation.

Before each command it looks at its connection within a timeout of zero seconds. A task that is cancelled just before
that is told of it there, where Python takes it for the timeout: the task goes on as if nothing had been said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_AGAIN_S: Final = 0.05


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """What the coroutine comes to. A cancellation of the caller is never lost; the work is then cancelled too."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)
    return task.result()


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Return when the task has ended, whatever it has come to."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_S)
    _forget(task)


def _forget(task: asyncio.Task[Any]) -> None:
    """Nobody is left to hear of an error."""
    if not task.cancelled():
        task.exception()
