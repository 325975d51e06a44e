"""`make demo`: a worker with a server of its own, and a producer beside it that asks it four things at once.

Starts both as processes bound to this one's life, says what is going on, and leaves nothing running: not at the end,
not after Ctrl-C, not when it is killed. What a producer does stands in demo_producer.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import redis

from inferq.engine.lifeline import spawn_bound
from inferq.producer.contract import Keys

KEYS = Keys("demo")
READY_SECONDS = 240.0
PATIENCE_SECONDS = 6.0
STOP_SECONDS = 10.0
LOG_LINES = 20


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


class Interrupted(Exception):
    """Somebody ended the demo: Ctrl-C, SIGTERM, or the end of the process that started it."""


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted


@contextmanager
def bound(*command: str, output: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone when the block ends: asked to end first, killed when it takes too long."""
    process = spawn_bound([sys.executable, *command], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Demo:
    """One run: its folder, its worker, its log."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "worker.log"
        self.socket = folder / "valkey.sock"
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self._starter = os.getppid()

    def run(self) -> None:
        with ExitStack() as stack:
            say("starting a worker and its server")
            output = stack.enter_context(self.log.open("wb"))
            worker = stack.enter_context(bound(*self._worker_command(), output=output.fileno()))
            self._wait_until_ready(worker)
            say("four chats are submitted at once by another process; chat-3 is cancelled part-way")
            look = f"redis-cli -s {self.socket} XRANGE {KEYS.events('chat-1')} - +"
            say(f"to look inside meanwhile, in another terminal:\n  {look}")
            producer = stack.enter_context(bound(str(Path(__file__).with_name("demo_producer.py")), self.url))
            while (status := producer.poll()) is None:
                self._check(worker)
                time.sleep(0.05)
            if status:
                raise DemoFailed(f"the producer exited with {status}")
        say("done: worker, server and producer have ended")

    def _worker_command(self) -> tuple[str, ...]:
        embedded = ("--embedded", "--embedded-dir", str(self._folder), "--drain-seconds", "0")
        return ("-m", "inferq.worker.main", "--model", "demo", *embedded)

    def _wait_until_ready(self, worker: subprocess.Popen[bytes]) -> None:
        start = time.monotonic()
        told = False
        while not self._is_ready():
            self._check(worker)
            seconds = time.monotonic() - start
            if seconds > READY_SECONDS:
                raise DemoFailed(f"the worker was not ready within {READY_SECONDS:.0f} s")
            if seconds > PATIENCE_SECONDS and not told:
                say("loading; the first time the model is unpacked once, which takes about 20 s")
                told = True
            time.sleep(0.05)
        say(f"the model is ready after {time.monotonic() - start:.1f} s")

    def _is_ready(self) -> bool:
        """A worker that can take jobs puts up its model's card."""
        if not self.socket.exists():
            return False
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.exists(KEYS.card))
        except redis.ConnectionError:
            return False

    def _check(self, worker: subprocess.Popen[bytes]) -> None:
        if worker.poll() is not None:
            raise DemoFailed(f"the worker exited with {worker.returncode}")
        if os.getppid() != self._starter:  # `make` was killed
            raise Interrupted

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-LOG_LINES:])


def say(text: str) -> None:
    with suppress(BrokenPipeError):  # whoever read the output has seen enough
        print(f"inferq: {text}", flush=True)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    with tempfile.TemporaryDirectory(prefix="inferq-demo-", ignore_cleanup_errors=True) as folder:
        demo = Demo(Path(folder).resolve())
        try:
            demo.run()
        except Interrupted:
            say("interrupted; worker, server and producer have ended")
            return 130
        except DemoFailed as exc:
            print(f"inferq: {exc}; the end of the worker's log:\n{demo.last_lines()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
