"""The documentation tells the truth where a program can see it: settings, keys, events, links, examples."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import arq.connections
import pytest
import redis.asyncio
from arq.connections import RedisSettings
from pydantic_settings import CLI_SUPPRESS
from support.tree import LAYERS, ROOT

import inferq.producer
from inferq.producer.contract import FUNCTION, Keys, decode_json
from inferq.producer.events import EVENT_TYPES, ErrorCode
from inferq.producer.requests import GenerateRequest, Sampling
from inferq.worker.settings import WorkerSettings

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
WIRE = (ROOT / "docs" / "wire.md").read_text()


def rows(text: str, cells: int) -> list[list[str]]:
    """The rows of the Markdown tables of that width, without their backticks."""
    split = [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
    return [row for row in split if len(row) == cells]


def test_every_setting_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    documented = {row[0].removeprefix("| ").strip("`"): row for row in rows(text, 4)}
    settings = {
        f"--{name.replace('_', '-')}": field
        for name, field in WorkerSettings.model_fields.items()
        if CLI_SUPPRESS not in field.metadata
    }
    assert {flag for flag in documented if flag.startswith("--")} == settings.keys()
    for flag, field in settings.items():
        _, variable, default, what = documented[flag]
        assert variable == f"INFERQ_{flag.removeprefix('--').replace('-', '_').upper()}"
        assert what
        if isinstance(field.default, bool):
            assert default == ("on" if field.default else "off"), flag
        elif isinstance(field.default, str | int | float):
            assert default == str(field.default), flag


def test_every_key_is_on_the_wires_page() -> None:
    keys = Keys("MODEL")
    names = [
        getattr(keys, name)
        if isinstance(inspect.getattr_static(Keys, name), property)
        else getattr(keys, name)("ID" if name != "worker" else "WORKER")
        for name in dir(Keys)
        if not name.startswith("_") and name not in ("model", "prefix")
    ]
    assert len(names) > 10
    for name in names:
        documented = name.replace("MODEL", "{model}").replace("WORKER", "{worker}").replace("ID", "{id}")
        assert f"| `{documented}` |" in WIRE


def test_every_event_code_and_field_is_on_the_wires_page() -> None:
    for kind in EVENT_TYPES:
        assert f"| `{kind}` |" in WIRE
    for word in (*ErrorCode, *GenerateRequest.model_fields, *Sampling.model_fields):
        assert f"`{word}`" in WIRE, word


def test_every_layer_is_in_the_readme_and_the_architecture() -> None:
    for page in ("README.md", "docs/architecture.md"):
        text = (ROOT / page).read_text()
        for layer in LAYERS:
            assert f"`{layer}/`" in text, (page, layer)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
                # As GitHub makes an anchor of a title: without punctuation.
                assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    """A path in backticks that starts with a folder of the project."""
    folders = (*LAYERS, "tests", "bench", "examples", "docs", "tools")
    for path in re.findall(rf"`((?:{'|'.join(folders)})/[\w./-]*)`", page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_readmes_producer_uses_what_there_is() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    tree = ast.parse(code)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    (imported,) = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "inferq.producer"]
    assert {alias.name for alias in imported.names} <= set(inferq.producer.__all__)
    calls = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    for name in calls & {"from_url", "submit", "stream", "result", "cancel"}:
        assert callable(getattr(inferq.producer.InferenceClient, name))
    assert {"from_url", "submit", "stream"} <= calls


def test_the_wires_job_is_one() -> None:
    (payload,) = re.findall(r"```json\n(.*?)```", WIRE, re.DOTALL)
    job = decode_json(payload.encode())
    assert job["f"] == FUNCTION
    (request,) = job["a"]
    assert GenerateRequest.model_validate(request).messages


async def test_the_plain_producer_of_the_wires_page_enqueues(redis_url: str, client: redis.asyncio.Redis) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", WIRE, re.DOTALL)
    program = compile(code, "wire.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    here = RedisSettings.from_dsn(redis_url)
    names: dict[str, Any] = {}
    with patch.object(arq.connections, "RedisSettings", lambda: here):
        await eval(program, names)
    await names["redis"].aclose()
    keys = Keys("demo")
    assert await client.zrange(keys.queue, 0, -1) == [b"my-job"]
    job = decode_json(await client.get(keys.payload("my-job")))
    assert GenerateRequest.model_validate(job["a"][0]).prompt == "Once upon a time"


def test_the_readmes_make_targets_exist() -> None:
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets
