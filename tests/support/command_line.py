"""`inferq` as a process of its own, and a worker's hand that answers it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process

from .waiting import wait_until
from .wire import Wire, following

PROCESSES: list[Process] = []


async def start(*arguments: str, url: str, **env: str) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "inferq.producer.cli",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "INFERQ_REDIS_URL": url, **env},
    )
    PROCESSES.append(process)
    return process


async def run(*arguments: str, url: str, stdin: bytes = b"", **env: str) -> tuple[int, str, str]:
    process = await start(*arguments, url=url, **env)
    out, err = await process.communicate(stdin)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, out.decode(), err.decode()


async def work(wire: Wire, *texts: str, kind: str = "finished", data: str | None = None) -> dict[str, object]:
    """Take the next job as a worker does, publish the texts and the end; the request that was taken."""

    async def claimed() -> object:
        return await wire.claim()

    (job,) = await wait_until(claimed)
    at = 0
    for number, text in enumerate(texts, start=1):
        delta = {"index": number - 1, "at": at, "text": text, "token_ids": [number]}
        await wire.publish(following(job, number)._replace(data=json.dumps(delta)))
        at += len(text)
    last = following(job, len(texts) + 1, kind="finished")
    await wire.worker.finish(last._replace(type=kind, data=data or last.data))
    return json.loads(job.payload)["a"][0]
