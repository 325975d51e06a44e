"""Real worker processes for tests: started, watched and ended without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import redis

from inferq.engine.lifeline import spawn_bound
from inferq.producer import connect
from support.waiting import wait_until

SCRIPTED_ENGINE = Path(__file__).parents[2] / "bench" / "scripted_engine.py"


class WorkerProcess:
    """An `inferq-worker` and its log."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.name = ""  #: its --worker-id, where a suite gives it one
        self._log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """The worker and all that it has started."""
        root = psutil.Process(self.pid)
        return [root, *root.children(recursive=True)]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def wait(self, timeout: float = 60.0) -> int:
        """Return its exit code. Raises AssertionError, with the log's end, when it does not end in time."""
        try:
            return await asyncio.to_thread(self.process.wait, timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker still runs after {timeout} s:\n{self.log[-3000:]}") from None

    async def until_ready(self, model: str, timeout: float = 240.0) -> None:
        """Return when the worker has put up its model's card."""

        async def card() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the worker exited with {self.process.returncode}:\n{self.log[-3000:]}")
            async with connect(self.url) as connection:
                try:
                    return bool(await connection.exists(f"inferq:{model}:card"))
                except redis.ConnectionError:
                    return False

        await wait_until(card, timeout=timeout, what=f"a card of {model}")


@contextmanager
def start_worker(url: str, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[WorkerProcess]:
    """Start a worker against the server at `url`; killed, with its children, at the end if it still runs."""
    with tempfile.TemporaryDirectory(prefix="inferq-worker-") as folder:
        log = Path(folder) / "worker.log"
        with log.open("wb") as sink:
            process = spawn_bound(
                [sys.executable, "-m", "inferq.worker.main", "--redis-url", url, *flags],
                env={**os.environ, **(environment or {})},
                stdout=sink,
                stderr=sink,
            )
        started = WorkerProcess(process, url, log)
        try:
            yield started
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def scripted(*flags: str) -> dict[str, str]:
    """The environment that puts the scripted engine in the place of the model's."""
    return {"INFERQ_ENGINE_COMMAND": " ".join([sys.executable, str(SCRIPTED_ENGINE), *flags])}


async def all_gone(processes: list[psutil.Process], timeout: float = 30.0) -> None:
    """Return when none of the processes runs any more (a zombie does not run)."""

    def gone() -> bool:
        return not any(_runs(process) for process in processes)

    await wait_until(gone, timeout=timeout, what=f"{processes} have ended")


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
