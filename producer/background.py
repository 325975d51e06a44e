"""An event loop in a thread of its own, for callers that have none.

A process that was forked after the thread began has no such thread: there a new one begins at the first call.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, Generic, TypeVar

from .errors import RedisUnavailable

T = TypeVar("T")
R = TypeVar("R")

#: So long the end of the thread is waited for: what it does then is to close connections.
_FAREWELL_S: Final = 10.0


class _Thread(Generic[R]):
    """A running loop, and the resource that lives in it."""

    def __init__(self, make: Callable[[], R], close: Callable[[R], Awaitable[None]]) -> None:
        self.pid = os.getpid()
        self._make, self._close = make, close
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, R]] = Future()
        self._thread = threading.Thread(target=self._run, name="inferq-client", daemon=True)
        self._thread.start()
        self.loop, self._stop, self.resource = self._ready.result()

    @property
    def is_own(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Close the resource and end the thread. Only in the process that began it."""
        if self.pid == os.getpid() and self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            if not self.is_own:  # the garbage collector may run anywhere
                self._thread.join(_FAREWELL_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:
            if self._ready.done():
                raise
            self._ready.set_exception(exc)

    async def _serve(self) -> None:
        stop, resource = asyncio.Event(), self._make()
        self._ready.set_result((asyncio.get_running_loop(), stop, resource))
        try:
            await stop.wait()
        finally:
            await self._close(resource)


class Background(Generic[R]):
    """Runs coroutines on a resource that `make` makes within the loop; from any thread.

    It is closed by `close`, when it is forgotten, and at the interpreter's end.
    """

    def __init__(self, make: Callable[[], R], close: Callable[[R], Awaitable[None]]) -> None:
        self._make, self._close = make, close
        self._lock = threading.Lock()
        _ALL.add(self)
        self._threads: list[_Thread[R]] = []  # the last one is this process' own; those of a parent are left alone
        self._closed = False

    def run(self, work: Callable[[R], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine comes to; it is cancelled if the caller is interrupted.

        Raises RedisUnavailable after `close`, and RuntimeError when called by the thread that would have to run it.
        """
        future = self.start(work)
        try:
            return self.wait(future)
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Callable[[R], Coroutine[Any, Any, T]]) -> Future[T]:
        """Begin, to be waited for later."""
        with self._lock:  # so that nothing begins after the end of the thread
            if self._closed:
                raise _closed()
            if not self._threads or self._threads[-1].pid != os.getpid():
                thread = _Thread(self._make, self._close)
                self._threads.append(thread)
                weakref.finalize(self, thread.close)
            thread = self._threads[-1]
            return asyncio.run_coroutine_threadsafe(work(thread.resource), thread.loop)

    def wait(self, future: Future[T]) -> T:
        if self._threads[-1].is_own:
            raise RuntimeError("called from the client's own thread, which would wait for itself for ever")
        try:
            return future.result()
        except CancelledError:
            raise _closed() from None

    def close(self) -> None:
        """Returns when the resource is closed."""
        with self._lock:
            self._closed = True
            threads = tuple(self._threads)
        for thread in threads:
            thread.close()


def _closed() -> RedisUnavailable:
    return RedisUnavailable("the client is closed")


_ALL: Final = weakref.WeakSet[Background[Any]]()


def _renew_locks() -> None:
    """In a forked process: the thread that held one is not there to let go of it."""
    for each in _ALL:
        each._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
