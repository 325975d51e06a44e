"""A server that a test may kill and start again at the same address, with all that it had written or with less."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .servers import server_binary, wait_for_server


class RestartableServer:
    """Appends everything to its file before it answers."""

    def __init__(self, folder: Path) -> None:
        self._data = folder / "data"
        self._replica = folder / "replica"
        self._socket = folder / "valkey.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._data.mkdir()
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        options = ("--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._data))
        persistence = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
        self._process = subprocess.Popen(
            [server_binary(), *options, *persistence], stdout=subprocess.DEVNULL, start_new_session=True
        )
        wait_for_server(self.url, self._process)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def suspend(self) -> None:
        """It answers nothing any more, and closes no connection."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def replicate(self) -> None:
        """Keep what is written now, as a replica does that falls behind from here on."""
        shutil.copytree(self._data, self._replica)

    def fail_over(self) -> None:
        """The server is gone, and that replica has taken its place: it lacks all that was written since."""
        self.kill()
        shutil.rmtree(self._data)
        self._replica.rename(self._data)
        self.start()


@contextmanager
def restartable_server() -> Iterator[RestartableServer]:
    with tempfile.TemporaryDirectory(prefix="inferq-test-") as folder:
        server = RestartableServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()
