"""`inferq` in a terminal of its own, and what that shows."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .command_line import PROCESSES
from .waiting import wait_until


@dataclass
class Terminal:
    process: Process
    _ours: int
    _shown: bytearray = field(default_factory=bytearray)

    async def until(self, text: bytes) -> bytes:
        """Return what is shown up to the end of the text, and was not returned before."""

        def has() -> bool:
            try:
                self._shown.extend(os.read(self._ours, 4096))
            except (BlockingIOError, OSError):
                pass
            return text in self._shown

        await wait_until(has, what=f"{text!r} is shown, after {bytes(self._shown)!r}")
        end = self._shown.index(text) + len(text)
        found = bytes(self._shown[:end])
        del self._shown[:end]
        return found

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)


@asynccontextmanager
async def terminal(*arguments: str, url: str) -> AsyncIterator[Terminal]:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        # a new session has no controlling terminal, and takes the first that it opens
        "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); "
        "from inferq.producer.cli import main; sys.exit(main(sys.argv[1:]))",
        *arguments,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "INFERQ_REDIS_URL": url, "TERM": "dumb"},
    )
    os.close(theirs)
    PROCESSES.append(process)
    try:
        yield Terminal(process, ours)
    finally:
        os.close(ours)
