"""The commands of the examples' READMEs, as they stand there, with the real model."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis.asyncio
from support.node import needs_node, node
from support.tree import ROOT
from support.waiting import wait_until
from support.web_apps import WebApp, commands_of, running_app, started, text_of, tokens_of

from inferq.producer import InferenceClient
from inferq.producer.contract import Keys

EXAMPLES = ROOT / "examples"
#: What takes the place of the port that is written there, or of the program's own.
AT_SOCKET = {"fastapi_app": "--uds {}", "flask_app": "--host unix://{}"}
_README_FOLDER = "/tmp/inferq-chat"


def as_here(command: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """A README's command, with this machine's paths: what to run, and its environment."""
    words = shlex.split(command.replace(_README_FOLDER, str(folder)).replace(" examples/", f" {EXAMPLES}/"))
    environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *arguments = words[len(environment) :]
    return [program.replace(".venv/bin", str(Path(sys.executable).parent)), *arguments], environment


@contextmanager
def worker_of(readme: Path, folder: Path) -> Iterator[None]:
    command, environment = as_here(commands_of(readme)[0], folder)
    with started(command, folder / "worker.log", environment):
        yield


@asynccontextmanager
async def app_of(name: str, folder: Path) -> AsyncIterator[WebApp]:
    command, environment = as_here(commands_of(EXAMPLES / name / "README.md")[1], folder)
    socket = folder / f"{name}.sock"
    async with running_app([*command, *AT_SOCKET[name].format(socket).split()], socket, environment) as app:
        yield app


async def _has_card(url: str) -> bool:
    async with redis.asyncio.Redis.from_url(url) as client:
        try:
            return bool(await client.exists(Keys("demo").card))
        except redis.ConnectionError:
            return False


@pytest.mark.timeout(400)
@needs_node
@pytest.mark.slow(family="examples", share=0.25)
async def test_the_two_commands_of_each_readme_are_enough(folder: Path) -> None:
    """One worker for both apps, since both pages start the same. The reader in JavaScript reads what they asked for."""
    fastapi, flask = (EXAMPLES / name / "README.md" for name in AT_SOCKET)
    assert commands_of(fastapi)[0] == commands_of(flask)[0]
    url = f"unix://{folder}/valkey.sock"
    with worker_of(fastapi, folder):
        await wait_until(lambda: _has_card(url), timeout=240, what="the model is served")
        for name in AT_SOCKET:
            async with app_of(name, folder) as app, InferenceClient.from_url(url) as producer:
                chat = await app.ask("Tell me of a llama, with emoji 🦙.", max_tokens=24)
                async with app.listen(chat) as heard:
                    await heard.to_the_end()
                result = await producer.result(chat)
                assert result.token_ids and result.text
                assert tokens_of(heard.events) == list(result.token_ids)
                assert text_of(heard.events) == result.text
            ((*words, _, _), _) = as_here(commands_of(EXAMPLES / "javascript_reader" / "README.md")[0], folder)
            assert words[0] == "node"
            async with node(Path(words[1]), url, chat) as reader:
                printed = await reader.ended()
            assert "".join(event["text"] for event in printed if event["type"] == "delta") == result.text
