"""A child process as a test holds it: the other end of its pipe, without any of the parent's machinery."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from inferq.engine.config import EngineConfig
from inferq.engine.pipe import Decoder, Down, Freed, Ready, Step, Up, encode
from support.scripted import SCRIPTED_ENGINE

T = TypeVar("T")


class Child:
    """Sends and receives messages; `seen` has all that came up so far."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        self.seen: list[Up] = []
        self._decoder = Decoder()

    def send(self, *messages: Down) -> None:
        self.connection.sendall(b"".join(encode(message) for message in messages))

    def receive(self, timeout: float = 30.0) -> bool:
        """Take what comes next into `seen`; False at the pipe's end."""
        self.connection.settimeout(timeout)
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        self.seen += self._decoder.feed(data)
        return bool(data)

    def until(self, fact: Callable[[], T], timeout: float = 30.0) -> T:
        """The first true value of `fact`. Raises AssertionError at the pipe's end, TimeoutError after `timeout`."""
        end = time.monotonic() + timeout
        while not (value := fact()):
            assert self.receive(max(0.01, end - time.monotonic())), f"the pipe ended after {self.seen[-3:]}"
        return value

    def read_to_the_end(self) -> list[Up]:
        while self.receive():
            pass
        return self.seen

    def all(self, kind: type[T]) -> list[T]:
        return [message for message in self.seen if isinstance(message, kind)]

    @property
    def ready(self) -> Ready:
        return self.until(lambda: self.all(Ready))[0]

    def freed(self, key: int) -> Freed | None:
        return next((message for message in self.all(Freed) if message.key == key), None)

    def tokens(self, key: int) -> list[int]:
        return [token_id for out in self._outputs(key) for token_id in out[1]]

    def finish_reason(self, key: int) -> str | None:
        return next((out[2] for out in self._outputs(key) if out[2]), None)

    def _outputs(self, key: int) -> list[list[Any]]:
        return [out for step in self.all(Step) for out in step.outputs if out[0] == key]


@contextmanager
def start_child(command: list[str], config: EngineConfig | str) -> Iterator[Child]:
    """Start `command --fd N --config JSON`; killed at the end if it still runs."""
    ours, theirs = socket.socketpair()
    text = config if isinstance(config, str) else config.to_json()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno()), "--config", text],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        with process:
            try:
                yield Child(process, ours)
            finally:
                if process.poll() is None:
                    process.kill()


@contextmanager
def scripted_child(*flags: str, **config: Any) -> Iterator[Child]:
    """The scripted engine with these flags and fields of EngineConfig."""
    with start_child([sys.executable, str(SCRIPTED_ENGINE), *flags], EngineConfig(**config)) as child:
        yield child
