"""SIGTERM and SIGINT as two facts: the worker was asked to stop, and it was asked to hurry.

The handlers are the event loop's, so that they work for process 1 of a container too. Knows nothing of what stops.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")
_STOP: Final = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """The worker was asked to stop before it had begun."""


class StopSignals:
    """A context in which the first signal sets `asked`, and a second one `hurried`.

    With `ends_process` a process that was asked to stop ignores all further signals after the context: on its last way
    they would change its exit code, and nothing else.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self._ends_process = ends_process
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def __enter__(self) -> Self:
        for number in _STOP:
            asyncio.get_running_loop().add_signal_handler(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _STOP:
            asyncio.get_running_loop().remove_signal_handler(number)
            if self._ends_process and self.asked.is_set():
                signal.signal(number, signal.SIG_IGN)

    async def unless_asked(self, start: Coroutine[Any, Any, T]) -> T:
        """What `start` returns. Raises Stopped, and cancels `start`, as soon as the worker is asked to stop."""
        task, asked = asyncio.ensure_future(start), asyncio.ensure_future(self.asked.wait())
        await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            raise Stopped
        return task.result()

    def _receive(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


async def first_of(*waits: Coroutine[Any, Any, object], timeout: float | None = None) -> None:
    """Return when one of the waits is over, or the time is; the others are cancelled. Raises what the first raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
