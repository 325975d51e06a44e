"""The example for other languages reads what Python's client reads: of a killed worker's streams too."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from support.queue import KEYS, MODEL, answer_to, scripted_worker
from support.restarts import restartable_server
from support.streams import until_delta

from inferq.producer import InferenceClient

NODE = shutil.which("node")
READER = Path(__file__).parents[2] / "examples" / "javascript_reader" / "reader.mjs"
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
SLOW = ["--step-ms", "10"]
SHORT = ("--lease-seconds", "1")


async def start(url: str, request_id: str, *flags: str) -> asyncio.subprocess.Process:
    assert NODE is not None
    return await asyncio.create_subprocess_exec(NODE, str(READER), url, request_id, *flags, stdout=PIPE, stderr=PIPE)


async def read(url: str, request_id: str, *flags: str) -> tuple[list[dict[str, Any]], str, int]:
    """Its events, its last position, its exit code."""
    process = await start(url, request_id, "--json", *flags)
    async with asyncio.timeout(90):
        out, err = await process.communicate()
    position = err.decode().splitlines()[-1].removeprefix("position ")
    assert process.returncode is not None
    return [json.loads(line) for line in out.splitlines()], position, process.returncode


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "delta")


async def test_it_reads_on_when_the_worker_is_killed(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with (
        InferenceClient.from_url(redis_url, model=MODEL) as c,
        scripted_worker(redis_url, *SHORT, engine=SLOW) as a,
        scripted_worker(redis_url, *SHORT, engine=SLOW),
    ):
        ids = [await c.submit(f"read {number}", sampling={"max_tokens": 200}) for number in range(4)]
        readers = [asyncio.create_task(read(redis_url, request_id)) for request_id in ids]
        for request_id in ids:
            await until_delta(client, KEYS, request_id, at_least=20)
        a.send(signal.SIGKILL)
        for number, reader in enumerate(readers):
            events, _, code = await reader
            assert code == 0
            assert text_of(events) == answer_to(f"read {number}", 200)
            assert [event["type"] for event in events].count("finished") == 1
            assert events[-1]["type"] == "finished"


async def test_each_of_its_positions_is_one_to_go_on_from(redis_url: str) -> None:
    """By itself and by Python's client, and so are those of Python's client for it."""
    async with InferenceClient.from_url(redis_url, model=MODEL) as c, scripted_worker(redis_url, engine=SLOW):
        request_id = await c.submit("positions 🦙", sampling={"max_tokens": 40})
        whole = (await c.result(request_id)).text
        events, last, _ = await read(redis_url, request_id)
        assert text_of(events) == whole
        had = ""
        for event in events:
            had += event.get("text", "")
            stream = c.stream(request_id, event["position"])
            rest = [each.text async for each in stream if each.type == "delta"]
            assert had + "".join(rest) == whole
        middle = events[len(events) // 2]
        rest, _, _ = await read(redis_url, request_id, "--position", middle["position"])
        assert text_of(events[: len(events) // 2 + 1]) + text_of(rest) == whole
        plain = middle["position"].partition(":")[0]
        rest, _, _ = await read(redis_url, request_id, "--position", plain)
        assert text_of(events[: len(events) // 2 + 1]) + text_of(rest) == whole
        rest, _, _ = await read(redis_url, request_id, "--position", last)
        assert text_of(rest) == ""


async def test_what_a_failover_undid_is_not_shown_twice() -> None:
    """The reader had tokens that the new primary has never seen: behind its position come those after them alone."""
    with restartable_server() as server:
        async with scripted_worker(server.url, "--lease-seconds", "60", engine=SLOW):
            async with (
                InferenceClient.from_url(server.url, model=MODEL) as c,
                redis.asyncio.Redis.from_url(server.url) as client,
            ):
                request_id = await c.submit("undone", sampling={"max_tokens": 300})
                reader = asyncio.create_task(read(server.url, request_id))
                await until_delta(client, KEYS, request_id, at_least=20)
                server.replicate()
                await until_delta(client, KEYS, request_id, at_least=150)
            server.fail_over()
            had, position, code = await reader
            assert code == 1, "its connection was lost"
            rest, _, code = await read(server.url, request_id, "--position", position)
            assert code == 0
            assert text_of(had) + text_of(rest) == answer_to("undone", 300)
            assert len(text_of(had)) > 100


async def test_an_unknown_request_is_said(redis_url: str) -> None:
    _, _, code = await read(redis_url, "nobody")
    assert code == 1
