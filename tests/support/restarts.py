"""A server that a test may kill and start again at the same address, with all that it had written or with less.

Its next start may take a while: then it answers from the first moment on, but with nothing except -LOADING.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import redis

from .servers import server_binary, wait_for_server

#: So many commands of the file, each this long, are some seconds of loading. It answers after each 1024 of them.
_COMMANDS_TO_LOAD: Final = 20_000
_MICROSECONDS_A_COMMAND: Final = 100


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
        wait_for_server(self.url, self._spawn())

    def _spawn(self, *more: str) -> subprocess.Popen[bytes]:
        options = ("--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._data))
        persistence = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
        self._process = subprocess.Popen(
            [server_binary(), *options, *persistence, *more], stdout=subprocess.DEVNULL, start_new_session=True
        )
        return self._process

    def write_much(self) -> None:
        """Fill the file, and nothing else: the key that it tells of is gone again."""
        with redis.Redis.from_url(self.url) as client, client.pipeline(transaction=False) as pipe:
            for _ in range(_COMMANDS_TO_LOAD):
                pipe.set("filler", "x")
            pipe.delete("filler")
            pipe.execute()

    def start_loading(self) -> None:
        """Start it after `write_much`, and return while it loads: `is_loading` says for how long."""
        process = self._spawn("--key-load-delay", str(_MICROSECONDS_A_COMMAND))
        end = time.monotonic() + 20
        while time.monotonic() < end and process.poll() is None:
            try:
                assert self.is_loading, "it has loaded everything already"
                return
            except redis.ConnectionError:
                time.sleep(0.01)
        raise RuntimeError("the server did not begin to load")

    @property
    def is_loading(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            return bool(client.info("persistence")["loading"])

    def num_refused(self, command: str) -> int:
        """How many calls of a command it has refused since its start, without looking at what they ask for."""
        with redis.Redis.from_url(self.url) as client:
            return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("rejected_calls", 0))

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
