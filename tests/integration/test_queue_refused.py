"""A server that answers and refuses: the worker's log says why, and it waits or ends, by what that is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import redis.asyncio
from support.processes import scripted, start_worker
from support.queue import KEYS, MODEL, answer_to, scripted_worker
from support.servers import valkey
from support.streams import assert_unbroken, until_delta, until_ended
from support.waiting import wait_until

from inferq.producer import InferenceClient
from inferq.worker.main import Exit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacks", "reason"), [("-evalsha", "'evalsha' command"), ("-zadd", "'zadd' command"), ("wrong type", "WRONGTYPE")]
)
async def test_a_worker_that_may_never_work_ends_and_says_why(lacks: str, reason: str) -> None:
    with valkey() as url:
        async with redis.asyncio.Redis.from_url(url) as admin:
            if lacks == "wrong type":
                await admin.set(KEYS.workers, "somebody else's")
            else:
                await admin.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", lacks)
                url = url.replace("unix://", "unix://limited:secret@")
            with start_worker(url, "--served-model-name", MODEL, environment=scripted()) as worker:
                assert await worker.wait(timeout=120) == Exit.BROKEN
                (line,) = [line for line in worker.log.splitlines() if "redis.unusable" in line]
                assert reason in line
                assert "secret" not in worker.log
                assert "Traceback" not in worker.log


@pytest.mark.slow
async def test_a_server_that_cannot_write_to_its_disk_is_waited_out() -> None:
    """MISCONF: it refuses every write until a snapshot succeeds."""
    with valkey("--save", "3600 1") as url:
        obstacle = Path(url.removeprefix("unix://")).parent / "dump.rdb" / "in the way"
        async with (
            scripted_worker(url, "--lease-seconds", "60", engine=["--step-ms", "10"]) as worker,
            redis.asyncio.Redis.from_url(url) as client,
            InferenceClient.from_url(url, model=MODEL) as producer,
        ):
            request_id = await producer.submit("disk", sampling={"max_tokens": 300})
            await until_delta(client, KEYS, request_id)
            obstacle.mkdir(parents=True)
            await client.bgsave()
            await wait_until(lambda: "MISCONF" in worker.log, what="the reason in the log")
            shutil.rmtree(obstacle.parent)
            await client.bgsave()
            assert_unbroken(await until_ended(client, KEYS, request_id), answer_to("disk", 300))
