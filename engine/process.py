"""The engine's child process: its end of the pipe, and its life from the first argument to its exit code.

A thread reads the pipe and ends the process when the parent is gone, in mid-step too; another writes, so that the step
loop never waits for a reader. It loads the model, says Ready and hands over to the step loop. It knows neither
requests nor tensors, and imports what needs torch only to load.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Protocol

from .config import EngineConfig
from .core import EngineCore, Runner
from .errors import EngineError, SettingError
from .pipe import Decoder, Down, Fatal, Log, PipeError, Stop, Up, encode

_RECV_BYTES: Final = 1 << 18
#: How long the last words may take to reach a parent that does not read.
_FLUSH_SECONDS: Final = 5.0


class LogSink(Protocol):
    """Takes a line for the parent's log."""

    def __call__(self, level: str, event: str, **details: Any) -> None: ...


class ChildPipe:
    """The child's end of the pipe. `inbox` fills by itself; `send` never blocks.

    What waits to be written is bounded by what the parent asked for: it pauses requests that run ahead of it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.inbox: SimpleQueue[Down | PipeError] = SimpleQueue()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._connection = connection
        self._writer = threading.Thread(target=self._write, name="pipe-writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="pipe-reader", daemon=True).start()

    def send(self, message: Up) -> None:
        self._outbox.put(encode(message))

    def log(self, level: str, event: str, **details: Any) -> None:
        self.send(Log(level, event, {name: _plain(value) for name, value in details.items()}))

    def flush(self) -> None:
        """Let what was sent reach the parent. Nothing may be sent afterwards."""
        self._outbox.put(None)
        self._writer.join(_FLUSH_SECONDS)

    def _read(self) -> None:
        decoder = Decoder()
        exit_code = 1  # The parent went without a word.
        while data := _receive(self._connection):
            try:
                for message in decoder.feed(data):
                    self.inbox.put(message)
                    if isinstance(message, Stop):
                        exit_code = 0
            except PipeError as exc:
                self.inbox.put(exc)
        # Not sys.exit: a step may run, or hang, in the main thread.
        os._exit(exit_code)

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                return  # The parent is gone, and the reader ends the process.


def serve(fd: int, load: Callable[[LogSink], Runner], core: Callable[..., EngineCore] = EngineCore) -> int:
    """Speak the protocol over the socket `fd` with the runner that `load` returns; the exit code.

    `core` makes the step loop of a runner, an inbox and a function that sends.
    0 after Stop. 1 where loading or a step failed: then Fatal is the last message, and the traceback of what is no
    EngineError is on stderr.
    """
    connection = socket.socket(fileno=fd)
    # A process that a library starts must not hold the pipe open.
    connection.set_inheritable(False)
    pipe = ChildPipe(connection)
    try:
        runner = load(pipe.log)
        pipe.send(runner.facts)
        core(runner, pipe.inbox, pipe.send).run()
    except Exception as exc:
        pipe.send(Fatal(_describe(exc), exc.setting if isinstance(exc, SettingError) else None))
        # An error of ours says what is wrong; where it was found helps nobody.
        if not isinstance(exc, EngineError):
            with suppress(OSError):
                traceback.print_exc()
        return 1
    else:
        return 0
    finally:
        pipe.flush()


def leave(exit_code: int) -> None:
    """End the process now: after a CUDA fault the libraries' own clean-up can hang or abort."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def ignore_signals() -> None:
    """The parent alone ends its child: Ctrl-C and a shutdown reach it first, and it lets requests finish."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def argument_parser() -> argparse.ArgumentParser:
    """The two arguments that the parent appends to the command of every kind of child."""
    parser = argparse.ArgumentParser(prog="python -m inferq.engine.process", description="inferq's engine process")
    parser.add_argument("--fd", type=int, required=True, help="the child's end of a socket pair")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    ignore_signals()
    options = argument_parser().parse_args(arguments)
    leave(serve(options.fd, lambda log: _load_model(EngineConfig.from_json(options.config), log)))


def _load_model(config: EngineConfig, log: LogSink) -> Runner:
    from .assembly import load_runner

    runner: Runner = load_runner(config, log)
    return runner


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_RECV_BYTES)
    except OSError:
        return b""


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


if __name__ == "__main__":
    main()
