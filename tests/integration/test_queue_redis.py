"""The worker and its server: away at the start, restarted while idle, unsuitable; the worker's signs of life."""

from __future__ import annotations

import json
import signal
import socket

import pytest
import redis.asyncio
from support.processes import start_worker
from support.queue import ENDLESS, KEYS, MODEL, answer_to, scripted_worker
from support.restarts import restartable_server
from support.servers import valkey
from support.waiting import wait_until

from inferq.producer import InferenceClient

SLOW = ["--step-ms", "10"]


async def test_no_server_at_the_start_is_exit_3_and_one_line(tmp_path: object) -> None:
    with start_worker(f"unix://{tmp_path}/none.sock") as worker:
        assert await worker.wait(30) == 3
        assert worker.log.splitlines()[-1].startswith("inferq-worker: Redis cannot be reached at --redis-url")


async def test_decoded_responses_are_refused_at_the_start(redis_url: str) -> None:
    with start_worker(redis_url + "&decode_responses=true") as worker:
        assert await worker.wait(30) == 2
        assert "decode_responses" in worker.log
        assert "Traceback" not in worker.log


async def test_a_policy_that_evicts_jobs_is_warned_of() -> None:
    with valkey("--maxmemory-policy", "allkeys-lru") as url:
        async with scripted_worker(url) as worker:
            (line,) = [json.loads(line) for line in worker.log.splitlines() if "redis.may_evict_jobs" in line]
            assert (line["policy"], line["wanted"], line["level"]) == ("allkeys-lru", "noeviction", "warning")


@pytest.mark.parametrize(("options", "warns"), [((), True), (("--appendonly", "yes"), False)])
async def test_a_server_that_keeps_nothing_is_warned_of(options: tuple[str, ...], warns: bool) -> None:
    with valkey(*options) as url:
        async with scripted_worker(url) as worker:
            assert ("redis.keeps_nothing" in worker.log) == warns


async def test_a_restart_while_idle_is_survived() -> None:
    with restartable_server() as server:
        async with scripted_worker(server.url, "--heartbeat-seconds", "0.3") as worker:
            for number in range(2):
                server.kill()
                await wait_until(lambda number=number: worker.log.count("redis.lost") > number * 3)
                server.start()
                async with InferenceClient.from_url(server.url, model=MODEL) as producer:
                    request_id = await producer.submit(f"after {number}", sampling={"max_tokens": 5})
                    assert (await producer.result(request_id, timeout=20)).text == answer_to(f"after {number}", 5)
            worker.send(signal.SIGTERM)
            assert await worker.wait(20) == 0


async def test_what_a_worker_says_of_itself(redis_url: str, client: redis.asyncio.Redis) -> None:
    flags = ("--worker-id", "w1", "--heartbeat-seconds", "0.2", "--max-num-seqs", "3", "--max-backlog", "77")
    async with (
        scripted_worker(redis_url, *flags, engine=SLOW) as worker,
        InferenceClient.from_url(redis_url, model=MODEL) as producer,
    ):
        await client.zadd(KEYS.workers, {"long-gone": 1})
        request_id = await producer.submit("run", sampling=ENDLESS)
        state = await wait_until(lambda: _state(client, running=1))
        assert (state["worker"], state["model"], state["pid"]) == ("w1", MODEL, worker.pid)
        assert (state["host"], state["slots"], state["tracked"]) == (socket.gethostname(), 3, 1)
        assert state["stats"]["running"] == 1
        seconds, microseconds = await client.time()
        assert 0 <= seconds * 1000 + microseconds / 1000 - state["started_at_ms"] < 60_000
        card = json.loads(await client.get(KEYS.card))
        assert card == {
            "model": MODEL,
            "vocab_size": 259,
            "max_model_len": 32768,
            "max_num_seqs": 3,
            "max_backlog": 77,
            "features": [],
        }
        assert 0 < await client.pttl(KEYS.worker("w1")) <= 600
        assert 0 < await client.pttl(KEYS.card) <= 600
        assert await wait_until(lambda: _members(client, [b"w1"]))
        await producer.cancel(request_id)
        state = await wait_until(lambda: _state(client, running=0))
        assert (state["tracked"], state["stats"]["used_blocks"]) == (0, 0)
    await wait_until(lambda: _gone(client))


async def _state(client: redis.asyncio.Redis, *, running: int) -> dict | None:
    state = json.loads(await client.get(KEYS.worker("w1")) or b"{}")
    idle = state.get("stats", {}).get("running") == state.get("running")
    return state if state.get("running") == running and idle else None


async def _members(client: redis.asyncio.Redis, members: list[bytes]) -> bool:
    return await client.zrange(KEYS.workers, 0, -1) == members


async def _gone(client: redis.asyncio.Redis) -> bool:
    """A worker that was killed is off the list by itself, three heartbeats later."""
    return not await client.exists(KEYS.card, KEYS.worker("w1"))
