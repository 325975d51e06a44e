"""A page in a real browser, where the machine has Chromium: driven over a pipe by its own protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from .waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--window-size=900,640",
    "--remote-debugging-pipe",
)


class Refused(Exception):
    """The browser's answer to a call, such as that the page it was for has navigated meanwhile."""


class Page:
    """The one page of a browser."""

    def __init__(self, commands: asyncio.StreamWriter, answers: asyncio.StreamReader) -> None:
        self._commands = commands
        self._answers = answers
        self._numbers = itertools.count(1)
        self._session = ""

    async def attach(self) -> None:
        target = await self._call("Target.createTarget", url="about:blank")
        self._session = (await self._call("Target.attachToTarget", **target, flatten=True))["sessionId"]

    async def open(self, url: str) -> None:
        await self._call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        found = await self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, timeout: float = 60.0) -> Any:
        """Its value, once it is true. An error meanwhile is a page that has not loaded, or is leaving."""

        async def value() -> Any:
            try:
                return await self.evaluate(f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()")
            except Refused:
                return None

        return await wait_until(value, timeout=timeout, what=expression)

    async def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self._call("Page.captureScreenshot"))["data"]))

    async def close(self) -> None:
        """Ends the browser, and all that it has started."""
        self._session = ""
        await self._call("Browser.close")

    async def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps({"id": number, "method": method, "params": parameters, **session}).encode())
        self._commands.write(b"\0")
        async with asyncio.timeout(60):
            while True:
                message = json.loads((await self._answers.readuntil(b"\0"))[:-1])
                if message.get("id") == number:
                    if "error" in message:
                        raise Refused(message["error"]["message"])
                    return message["result"]


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """A browser with an empty profile, which ends with the block."""
    assert CHROMIUM is not None
    reads_here, writes_there = os.pipe()
    reads_there, writes_here = os.pipe()
    with tempfile.TemporaryDirectory(prefix="inferq-chromium-", ignore_cleanup_errors=True) as profile:
        shell = f'exec "$0" "$@" 3<&{reads_there} 4>&{writes_there}'
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", shell, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}",
            pass_fds=(reads_there, writes_there),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        os.close(reads_there)
        os.close(writes_there)
        loop = asyncio.get_running_loop()
        answers = asyncio.StreamReader(limit=1 << 26)
        incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(reads_here, "rb", 0)
        )
        outgoing, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(writes_here, "wb", 0)
        )
        page = Page(asyncio.StreamWriter(outgoing, protocol, None, loop), answers)
        try:
            await page.attach()
            yield page
            await page.close()
            async with asyncio.timeout(20):
                await process.wait()
        finally:
            outgoing.close()
            incoming.close()
            if process.returncode is None:
                process.kill()
                await process.wait()
