"""The web apps of examples/ as processes on unix sockets, and what a browser sees of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from inferq.engine.lifeline import spawn_bound

from .scripted import continuation
from .tree import ROOT
from .waiting import wait_until

KINDS = ("fastapi", "flask")
_COMMANDS = {
    "fastapi": "-m uvicorn --app-dir {examples}/fastapi_app app:app --timeout-graceful-shutdown 1 --uds {socket}",
    "flask": "-m flask --app {examples}/flask_app/app.py run --host unix://{socket}",
}
_IM_START, _IM_END = 257, 258


@dataclass(frozen=True)
class WebApp:
    """An instance that answers."""

    process: subprocess.Popen[bytes]
    browser: httpx2.AsyncClient

    async def ask(self, message: str, **options: Any) -> str:
        """The id of a chat that was accepted."""
        response = await self.browser.post("/chats", json={"message": message, **options})
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    @asynccontextmanager
    async def listen(self, chat: str, last_event_id: str = "") -> AsyncIterator[Listening]:
        """An open connection to a chat's events; it is dropped when the block ends."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_event_id} if last_event_id else {})
        async with self.browser.stream("GET", f"/chats/{chat}/events", headers=headers) as response:
            yield Listening(response, last_event_id)


@dataclass
class Listening:
    """What has come by one connection. `events` holds the type and the data of each."""

    response: httpx2.Response
    last_event_id: str
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    retry_ms: int | None = None

    async def to_the_end(self) -> None:
        async for _ in self:
            pass

    async def until_tokens(self, number: int) -> None:
        """Return when so many tokens have come, or more."""
        async for _ in self:
            if len(tokens_of(self.events)) >= number:
                return
        raise AssertionError(f"the stream ended before {number} tokens: {self.events[-1:]}")

    async def __aiter__(self) -> AsyncIterator[str]:
        """The lines, each after what it says has been taken in; by the rules that browsers parse them with."""
        if not hasattr(self, "_lines"):
            self._lines = self.response.aiter_lines()
        fields: dict[str, str] = {}
        async for line in self._lines:
            name, _, value = line.partition(":")
            if not line and "data" in fields:
                self.last_event_id = fields.get("id", self.last_event_id)
                self.events.append((fields.get("event", "message"), json.loads(fields["data"])))
            elif line and not name:
                self.comments.append(value.strip())
            elif name == "retry":
                self.retry_ms = int(value)
            elif line:
                fields[name] = value.removeprefix(" ")
            if not line:
                fields = {}
                yield line


def tokens_of(events: list[tuple[str, dict[str, Any]]]) -> list[int]:
    return [token for kind, data in events if kind == "delta" for token in data["token_ids"]]


def text_of(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(data["text"] for kind, data in events if kind == "delta")


def chat_answer(message: str, count: int) -> list[int]:
    """What the scripted engine says to a chat of one message, as tokens; each is a byte of the text."""
    rendered = [_IM_START, *f"user\n{message}".encode(), _IM_END, *b"\n", _IM_START, *b"assistant\n"]
    return continuation(rendered, count)


@asynccontextmanager
async def web_app(kind: str, redis_url: str, folder: Path, name: str = "app", **environment: str) -> Any:
    """An instance of its own, by the command of its README but for the address."""
    socket = folder / f"{name}.sock"
    arguments = shlex.split(_COMMANDS[kind].format(socket=socket, examples=ROOT / "examples"))
    async with running_app([sys.executable, *arguments], socket, {"INFERQ_REDIS_URL": redis_url, **environment}) as app:
        yield app


@asynccontextmanager
async def running_app(command: list[str], socket: Path, environment: Mapping[str, str]) -> AsyncIterator[WebApp]:
    """An instance that was told to listen at this socket; killed at the end."""
    with started(command, socket.with_suffix(".log"), environment) as process:
        transport = httpx2.AsyncHTTPTransport(uds=str(socket))
        async with httpx2.AsyncClient(transport=transport, base_url="http://app", timeout=60) as browser:
            app = WebApp(process, browser)
            await wait_until(lambda: _answers(app), timeout=60, what=f"{command} answers")
            yield app


@asynccontextmanager
async def app_by_tcp(redis_url: str, folder: Path, port: int = 0) -> AsyncIterator[tuple[subprocess.Popen[bytes], int]]:
    """An instance of the FastAPI app that a browser can reach, and its port."""
    log = folder / "tcp.log"
    command = f"-m uvicorn --app-dir {ROOT / 'examples' / 'fastapi_app'} app:app --port {port}"
    with started([sys.executable, *shlex.split(command)], log, {"INFERQ_REDIS_URL": redis_url}) as process:
        found = await wait_until(lambda: re.search(r"running on http://[\d.]+:(\d+)", log.read_text()), timeout=60)
        yield process, int(found[1])


@contextmanager
def started(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as sink:
        process = spawn_bound(command, env={**os.environ, **environment}, stdout=sink, stderr=sink)
    try:
        yield process
        if process.poll() is None:  # uvicorn says of each stream that it has to cut off where that was
            assert "Traceback" not in log.read_text(errors="replace")
    except BaseException as exc:
        exc.add_note(f"the log of {command}:\n{log.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        process.kill()
        process.wait()


async def _answers(app: WebApp) -> bool:
    assert app.process.poll() is None, f"it exited with {app.process.returncode}"
    try:
        return (await app.browser.get("/")).status_code == 200
    except httpx2.TransportError:
        return False


def commands_of(page: Path) -> list[str]:
    """The shell commands that a page of documentation names, in order."""
    return [
        line for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL) for line in block.splitlines()
    ]
