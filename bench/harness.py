"""What the benchmarks of the queue share: a server and a worker of their own, and an engine in the model's place."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from figures import cannot_measure

from inferq.engine.lifeline import spawn_bound
from inferq.worker.embedded import embedded_server

SCRIPTED_ENGINE = Path(__file__).with_name("scripted_engine.py")


def scripted(*flags: str) -> dict[str, str]:
    """The environment that puts the scripted engine in the place of the model's."""
    return {"INFERQ_ENGINE_COMMAND": shlex.join([sys.executable, str(SCRIPTED_ENGINE), *flags])}


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    """A Valkey for several workers, in a temporary folder; its URL."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    async with embedded_server(None) as started:
        yield started.url


class Worker:
    """A running `inferq-worker`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, model: str, url: str) -> None:
        self.process = process
        self.folder = folder
        self.model = model
        self.url = url

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join((self.folder / "worker.log").read_text().splitlines()[-lines:])


@asynccontextmanager
async def worker(
    *flags: str, model: str, environment: Mapping[str, str] | None = None, url: str | None = None
) -> AsyncIterator[Worker]:
    """Start a worker, with an embedded server in a temporary folder if there is no `url`; gone, with its children, at
    the end.

    Ends the benchmark with CANNOT_MEASURE when the worker does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="inferq-bench-") as name:
        folder = Path(name)
        place = ["--embedded", "--embedded-dir", name] if url is None else ["--redis-url", url]
        command = [sys.executable, "-m", "inferq.worker.main", *place]
        with (folder / "worker.log").open("wb") as log:
            process = spawn_bound(
                [*command, "--served-model-name", model, *flags],
                env={**os.environ, **(environment or {})},
                stdout=log,
                stderr=log,
            )
        started = Worker(process, folder, model, url or f"unix://{folder / 'valkey.sock'}")
        try:
            await _until_ready(started)
            yield started
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _until_ready(started: Worker, timeout: float = 180.0) -> None:
    async def is_ready() -> bool:
        return '"worker.ready"' in started.log_tail(1000)

    if not await _poll(is_ready, lambda: started.process.poll() is None, timeout):
        cannot_measure(f"the worker did not become ready:\n{started.log_tail()}")


async def _poll(fact: Callable[[], Awaitable[bool]], alive: Callable[[], bool], timeout: float) -> bool:
    end = asyncio.get_running_loop().time() + timeout
    while asyncio.get_running_loop().time() < end and alive():
        if await fact():
            return True
        await asyncio.sleep(0.02)
    return False
