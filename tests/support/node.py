"""Programs in JavaScript, where the machine has node."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


class Program:
    """One that prints lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.printed: list[Any] = []

    async def until(self, number: int) -> None:
        """Return when it has printed so many lines."""
        assert self._process.stdout is not None
        while len(self.printed) < number:
            line = await self._process.stdout.readline()
            assert line, f"it ended after {len(self.printed)} lines: {await self._errors()}"
            self.printed.append(json.loads(line))

    async def ended(self) -> list[Any]:
        """All that it printed, once it has ended well."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.printed.append(json.loads(line))
        assert await self._process.wait() == 0, await self._errors()
        return self.printed

    async def failed(self) -> str:
        """What it said of its failure."""
        assert await self._process.wait() != 0
        return await self._errors()

    async def _errors(self) -> str:
        assert self._process.stderr is not None
        return (await self._process.stderr.read()).decode()


@asynccontextmanager
async def node(script: Path, *arguments: str, given: str | None = None) -> AsyncIterator[Program]:
    """A running program; killed at the end if it still runs. `given` is what it reads."""
    assert NODE is not None
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        NODE, str(script), *arguments, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 26
    )
    assert process.stdin is not None
    feeding = asyncio.create_task(_feed(process.stdin, (given or "").encode()))
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await asyncio.gather(feeding, return_exceptions=True)


async def _feed(stdin: asyncio.StreamWriter, given: bytes) -> None:
    stdin.write(given)
    await stdin.drain()
    stdin.close()
