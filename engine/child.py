"""The engine's process as the parent holds it: started, written to, read from, ended; never left behind.

Knows the pipe's framing and what a process is; knows nothing of requests. The child's standard output goes to
standard error, so that a crash is seen and no print of a model's code gets into the user's output.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from .config import EngineConfig
from .errors import EngineOverloadedError, InvalidRequestError
from .lifeline import spawn_bound
from .pipe import Add, Decoder, Down, PipeError, Stop, encode

_READ_BYTES: Final = 64 * 1024
#: What may wait to be written. The child drains its end at all times, but not while the event loop is busy.
MAX_UNSENT_BYTES: Final = 256 * 1024 * 1024
_POLL_SECONDS: Final = 0.01
_STANDARD_ERROR: Final = 2


class EngineProcess:
    """One child and its pipe. Belongs to one event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rest: socket.socket,
    ) -> None:
        """`rest` is our end of the pipe once more, for what is in it when a write has failed."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._rest = rest
        self._decoder = Decoder()

    @classmethod
    async def start(cls, command: Sequence[str], config: EngineConfig) -> Self:
        """Start `command --fd N --config JSON`. Raises OSError where that program cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                args = [*command, "--fd", str(theirs.fileno()), "--config", config.to_json()]
                process = spawn_bound(args, pass_fds=(theirs.fileno(),), stdout=_STANDARD_ERROR)
        except BaseException:
            ours.close()
            raise
        rest = ours.dup()
        rest.setblocking(False)
        try:
            reader = _LastWordsReader(limit=_READ_BYTES)
            loop = asyncio.get_running_loop()
            transport, protocol = await loop.create_unix_connection(
                lambda: asyncio.StreamReaderProtocol(reader), sock=ours
            )
        except BaseException:
            ours.close()
            rest.close()
            _kill_session(process)
            process.wait()
            raise
        return cls(process, reader, asyncio.StreamWriter(transport, protocol, reader, loop), rest)

    def __repr__(self) -> str:
        return f"<EngineProcess pid={self.pid} returncode={self._process.returncode}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Down) -> None:
        """Write without waiting. A child that has ended hears nothing.

        Raises EngineOverloadedError for an Add while MAX_UNSENT_BYTES or more would wait, InvalidRequestError for one
        that is too long for a frame. All other messages are small, and about requests that were added.
        """
        if self._writer.is_closing():
            return
        if not isinstance(message, Add):
            self._writer.write(encode(message))
            return
        num_unsent = self._writer.transport.get_write_buffer_size()
        if num_unsent < MAX_UNSENT_BYTES:
            try:
                frame = encode(message)
            except PipeError as exc:
                raise InvalidRequestError(f"the prompt is too long: {exc}") from exc
            if num_unsent + len(frame) <= MAX_UNSENT_BYTES:
                self._writer.write(frame)
                return
        raise EngineOverloadedError(f"{num_unsent} bytes wait to be sent to the engine, of {MAX_UNSENT_BYTES}")

    async def receive(self) -> Iterator[Any] | None:
        """The messages that came next, perhaps none; None at the pipe's end. Read all of them before the next call.

        Iterating raises PipeError for garbage.
        """
        data = await self._reader.read(_READ_BYTES)
        if not data:
            with suppress(OSError):
                data = self._rest.recv(_READ_BYTES)
        return self._decoder.feed(data) if data else None

    def kill(self) -> None:
        """At once, with whatever it has started."""
        if self._process.poll() is None:
            _kill_session(self._process)

    async def wait(self) -> int:
        """The exit status: a code, or minus the signal that ended it."""
        while (returncode := self._process.poll()) is None:  # noqa: ASYNC110 - an exit sets no event
            await asyncio.sleep(_POLL_SECONDS)
        return returncode

    async def end(self, *, grace_seconds: float) -> int:
        """See it ended: by itself within the grace, or killed. Cancelled meanwhile: killed. Closes the pipe."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self.wait()
        finally:
            self.kill()
            self._writer.transport.abort()  # what was not written reaches nobody any more
            self._rest.close()
            returncode = await self.wait()
            with suppress(OSError):
                await self._writer.wait_closed()
        return returncode

    async def terminate(self, *, grace_seconds: float) -> int:
        """Ask it to stop, then see it ended."""
        self.send(Stop())
        return await self.end(grace_seconds=grace_seconds)


class _LastWordsReader(asyncio.StreamReader):
    """Gives out what has arrived, whatever happens to a write.

    A child that fails says why and is gone. Who writes to it in that moment fails, too, and asyncio then drops what was
    received before and reads nothing more.
    """

    def set_exception(self, exc: Exception) -> None:
        self.feed_eof()


def describe_exit(returncode: int) -> str:
    """An exit status in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    # It leads a session, so its process group is its own, and stays its own until it is waited for.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
